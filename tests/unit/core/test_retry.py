import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.core.jobs import Job, JobSpec, Outcome, OutcomeKind
from gpuyard.core.lifecycle import JobEvent, JobState, can
from gpuyard.core.model import Need
from gpuyard.core.retry import judge, pause_s

UNLUCKY = (
    OutcomeKind.FAILED,
    OutcomeKind.CANNOT_START,
    OutcomeKind.OUT_OF_MEMORY,
    OutcomeKind.TIMED_OUT,
    OutcomeKind.LOST,
)


def job(retries: int = 0, failures: int = 0) -> Job:
    spec = JobSpec(command=("true",), cwd="/", environment={}, need=Need(), retries=retries)
    return Job(id=1, spec=spec, state=JobState.RUNNING, priority=0, user="u", submitted_at=0.0, failures=failures)


def test_a_success_and_a_cancellation_are_final_and_count_for_nothing() -> None:
    for kind, event in ((OutcomeKind.SUCCEEDED, JobEvent.SUCCEED), (OutcomeKind.CANCELLED, JobEvent.CANCEL)):
        verdict = judge(job(retries=3), Outcome(kind=kind))
        assert (verdict.event, verdict.counts) == (event, False)


def test_what_never_began_is_queued_again_and_uses_up_no_retry() -> None:
    verdict = judge(job(retries=0), Outcome(kind=OutcomeKind.UNBEGUN))
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


@pytest.mark.parametrize("kind", sorted(set(OutcomeKind) - {OutcomeKind.CANCELLED}))
def test_every_outcome_of_a_running_job_leads_somewhere(kind: OutcomeKind) -> None:
    for retries in (0, 1):
        assert can(JobState.RUNNING, judge(job(retries=retries), Outcome(kind=kind)).event)


@pytest.mark.parametrize("kind", [OutcomeKind.CANCELLED, OutcomeKind.TIMED_OUT])
def test_both_ways_of_being_stopped_lead_somewhere(kind: OutcomeKind) -> None:
    for retries in (0, 1):
        assert can(JobState.STOPPING, judge(job(retries=retries), Outcome(kind=kind)).event)
