import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.core.job.job import Growth, Job, JobSpec, Outcome, OutcomeKind
from gpuyard.core.job.lifecycle import LIVE, JobEvent, JobState, can
from gpuyard.core.job.retry import judge, judge_shortage, pause_s
from gpuyard.core.lease import Need

UNLUCKY = (
    OutcomeKind.FAILED,
    OutcomeKind.CANNOT_START,
    OutcomeKind.OUT_OF_MEMORY,
    OutcomeKind.TIMED_OUT,
    OutcomeKind.LOST,
    OutcomeKind.NOT_RESTORED,
)
SHORT = Outcome(kind=OutcomeKind.OUT_OF_MEMORY, status=1, reason="CUDA out of memory")


def job(retries: int = 0, failures: int = 0) -> Job:
    spec = JobSpec(command=("true",), cwd="/", environment={}, need=Need(), retries=retries)
    return Job(id=1, spec=spec, state=JobState.RUNNING, priority=0, user="u", submitted_at=0.0, failures=failures)


def test_a_success_and_a_cancellation_are_final_and_count_for_nothing() -> None:
    for kind, event in ((OutcomeKind.SUCCEEDED, JobEvent.SUCCEED), (OutcomeKind.CANCELLED, JobEvent.CANCEL)):
        verdict = judge(job(retries=3), Outcome(kind=kind))
        assert (verdict.event, verdict.counts) == (event, False)


def test_what_never_began_is_queued_again_and_uses_up_no_retry() -> None:
    verdict = judge(job(retries=0), Outcome(kind=OutcomeKind.NEVER_STARTED))
    assert (verdict.event, verdict.counts, verdict.delay_s) == (JobEvent.REQUEUE, False, 0.0)


@pytest.mark.parametrize("kind", UNLUCKY)
def test_without_retries_a_failure_is_final_and_says_why(kind: OutcomeKind) -> None:
    verdict = judge(job(), Outcome(kind=kind, reason="exit status 3"))
    assert (verdict.event, verdict.counts, verdict.text) == (JobEvent.FAIL, True, "exit status 3")
    assert judge(job(), Outcome(kind=kind)).text == kind


@pytest.mark.parametrize("kind", UNLUCKY)
def test_a_job_is_tried_once_more_than_it_has_retries(kind: OutcomeKind) -> None:
    events = [judge(job(retries=2, failures=failures), Outcome(kind=kind)).event for failures in range(4)]
    assert events == [JobEvent.RETRY, JobEvent.RETRY, JobEvent.FAIL, JobEvent.FAIL]


def test_the_pause_before_a_retry_is_told() -> None:
    verdict = judge(job(retries=3, failures=2), Outcome(kind=OutcomeKind.FAILED, status=1, reason="exit status 1"))
    assert verdict.delay_s == 4.0
    assert verdict.text.startswith("exit status 1; again in 4 s")
    assert "again at once" in judge(job(retries=1), Outcome(kind=OutcomeKind.TIMED_OUT)).text


@given(st.sampled_from(UNLUCKY), st.integers(0, 10_000))
def test_pauses_double_up_to_the_longest_and_never_shrink(kind: OutcomeKind, failures: int) -> None:
    pause, following = pause_s(kind, failures), pause_s(kind, failures + 1)
    assert 0.0 <= pause <= following <= 600.0
    assert following == 2 * pause or following == pause_s(kind, 10_000)


def test_one_that_made_room_is_queued_again_and_uses_up_no_retry() -> None:
    verdict = judge(job(retries=0), Outcome(kind=OutcomeKind.PREEMPTED, reason="it made room for an urgent job"))
    assert (verdict.event, verdict.counts, verdict.delay_s) == (JobEvent.REQUEUE, False, 0.0)
    assert verdict.text == "it made room for an urgent job; it is queued again"


# Out of memory


@pytest.mark.parametrize(
    ("growth", "said"),
    [
        (Growth(count=1, memory_mb=10_240.0), "again with 10 GB"),
        (Growth(count=2, ram_mb=2048.0), "again with 2 GB of RAM"),
        (Growth(count=3, is_alone=True), "again alone on the largest GPU"),
        (Growth(count=1), "again with more room"),
    ],
)
def test_one_that_ran_out_of_memory_is_run_again_with_more_and_uses_up_no_retry(growth: Growth, said: str) -> None:
    verdict = judge_shortage(SHORT, growth, 24_576.0)
    assert (verdict.event, verdict.counts, verdict.growth) == (JobEvent.RETRY, False, growth)
    assert said in verdict.text
    assert "CUDA out of memory" in verdict.text
    assert verdict.delay_s == 2.0 ** (growth.count - 1)


def test_one_that_was_given_all_there_is_has_failed_and_is_told_how_much_that_was() -> None:
    verdict = judge_shortage(SHORT, None, 24_576.0)
    assert (verdict.event, verdict.counts, verdict.growth) == (JobEvent.FAIL, False, None)
    assert "the largest GPU has 24 GB" in verdict.text


# Whatever happens leads somewhere


@pytest.mark.parametrize("kind", sorted(set(OutcomeKind) - {OutcomeKind.CANCELLED}))
@pytest.mark.parametrize("state", sorted(LIVE - {JobState.STOPPING}))
def test_every_outcome_of_a_live_job_leads_somewhere(state: JobState, kind: OutcomeKind) -> None:
    for retries in (0, 1):
        assert can(state, judge(job(retries=retries), Outcome(kind=kind)).event)
    for growth in (None, Growth(count=1)):
        assert can(state, judge_shortage(SHORT, growth, None).event)


@pytest.mark.parametrize(
    "kind",
    [
        OutcomeKind.CANCELLED, OutcomeKind.TIMED_OUT, OutcomeKind.PREEMPTED, OutcomeKind.NOT_RESTORED,
        OutcomeKind.SUCCEEDED,
    ],
)  # fmt: skip
def test_all_ways_of_being_stopped_lead_somewhere(kind: OutcomeKind) -> None:
    for retries in (0, 1):
        assert can(JobState.STOPPING, judge(job(retries=retries), Outcome(kind=kind)).event)
