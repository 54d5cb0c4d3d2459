from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuyard.model.job import Growth, Job, Outcome, OutcomeKind
from gpuyard.model.job_spec import JobSpec, RetryCause
from gpuyard.model.lease import Need
from gpuyard.model.lifecycle import LIVE, JobEvent, JobState, can
from gpuyard.model.retry import judge, judge_shortage, retry_delay_s

FAILURES = (
    OutcomeKind.FAILED,
    OutcomeKind.CANNOT_START,
    OutcomeKind.OUT_OF_MEMORY,
    OutcomeKind.TIMED_OUT,
    OutcomeKind.LOST,
    OutcomeKind.NOT_RESTORED,
)
SHORT = Outcome(kind=OutcomeKind.OUT_OF_MEMORY, status=1, reason="CUDA out of memory")


def job(retries: int = 0, failures: int = 0, **options: Any) -> Job:
    spec = JobSpec(command=("true",), cwd="/", environment={}, need=Need(), retries=retries, **options)
    return Job(id=1, spec=spec, state=JobState.RUNNING, priority=0, user="u", submitted_at=0.0, failures=failures)


def test_success_and_cancellation_are_final_and_use_up_no_retry() -> None:
    for kind, event in ((OutcomeKind.SUCCEEDED, JobEvent.SUCCEED), (OutcomeKind.CANCELLED, JobEvent.CANCEL)):
        verdict = judge(job(retries=3), Outcome(kind=kind))
        assert (verdict.event, verdict.counts) == (event, False)


def test_an_attempt_that_never_started_is_queued_again_and_uses_up_no_retry() -> None:
    verdict = judge(job(retries=0), Outcome(kind=OutcomeKind.NEVER_STARTED))
    assert (verdict.event, verdict.counts, verdict.delay_s) == (JobEvent.REQUEUE, False, 0.0)


@pytest.mark.parametrize("kind", FAILURES)
def test_without_retries_a_failure_is_final_and_gives_the_reason(kind: OutcomeKind) -> None:
    verdict = judge(job(), Outcome(kind=kind, reason="exit status 3"))
    assert (verdict.event, verdict.counts, verdict.text) == (JobEvent.FAIL, True, "exit status 3")
    assert judge(job(), Outcome(kind=kind)).text == kind


@pytest.mark.parametrize("kind", FAILURES)
def test_a_job_has_one_attempt_more_than_retries(kind: OutcomeKind) -> None:
    events = [judge(job(retries=2, failures=failures), Outcome(kind=kind)).event for failures in range(4)]
    assert events == [JobEvent.RETRY, JobEvent.RETRY, JobEvent.FAIL, JobEvent.FAIL]


def test_the_text_says_when_the_retry_comes() -> None:
    verdict = judge(job(retries=3, failures=2), Outcome(kind=OutcomeKind.FAILED, status=1, reason="exit status 1"))
    assert verdict.delay_s == 4.0
    assert verdict.text == "exit status 1; retry 3 of 3 after 4s"
    assert "retry 1 of 1 at once" in judge(job(retries=1), Outcome(kind=OutcomeKind.TIMED_OUT)).text


@given(st.sampled_from(FAILURES), st.integers(0, 10_000))
def test_delays_double_up_to_the_longest_and_never_shrink(kind: OutcomeKind, failures: int) -> None:
    delay, following = retry_delay_s(kind, failures), retry_delay_s(kind, failures + 1)
    assert 0.0 <= delay <= following <= 600.0
    assert following == 2 * delay or following == retry_delay_s(kind, 10_000)


def test_a_preempted_job_is_queued_again_and_uses_up_no_retry() -> None:
    verdict = judge(job(retries=0), Outcome(kind=OutcomeKind.PREEMPTED, reason="preempted by an urgent job"))
    assert (verdict.event, verdict.counts, verdict.delay_s) == (JobEvent.REQUEUE, False, 0.0)
    assert verdict.text == "preempted by an urgent job; queued again"


# What a job is retried after, and when

_CAUSE_OF = {
    OutcomeKind.TIMED_OUT: RetryCause.TIMEOUT,
    OutcomeKind.OUT_OF_MEMORY: RetryCause.OOM,
}


@given(st.sampled_from(FAILURES), st.sets(st.sampled_from(RetryCause)), st.booleans())
@example(kind=OutcomeKind.FAILED, named={RetryCause.DEVICE}, is_device_fault=True)
def test_a_job_is_retried_after_the_causes_that_it_names_only(
    kind: OutcomeKind, named: set[RetryCause], is_device_fault: bool
) -> None:
    chosen = tuple(cause for cause in RetryCause if cause in named)
    verdict = judge(job(retries=1, retry_on=chosen), Outcome(kind=kind), is_device_fault=is_device_fault)
    causes = {_CAUSE_OF.get(kind, RetryCause.FAILED)}
    if is_device_fault or kind is OutcomeKind.NOT_RESTORED:
        causes.add(RetryCause.DEVICE)
    assert (verdict.event is JobEvent.RETRY) == bool(causes & named)
    assert verdict.counts
    assert ("not retried (--retry-on" in verdict.text) == (verdict.event is JobEvent.FAIL)


def test_a_job_that_is_not_retried_after_running_out_of_memory_fails() -> None:
    verdict = judge_shortage(job(retries=3, retry_on=(RetryCause.FAILED,)), SHORT, Growth(count=1))
    assert (verdict.event, verdict.growth) == (JobEvent.FAIL, None)
    assert verdict.text == "CUDA out of memory; not retried (--retry-on failed)"


@given(st.sampled_from(FAILURES), st.floats(0.001, 1e6), st.integers(0, 10_000))
def test_an_own_delay_doubles_up_to_an_hour_or_to_itself(kind: OutcomeKind, own_s: float, failures: int) -> None:
    delay = retry_delay_s(kind, failures, own_s)
    assert retry_delay_s(kind, 0, own_s) == own_s
    assert own_s <= delay <= max(own_s, 3600.0)
    assert retry_delay_s(kind, failures + 1, own_s) in (2 * delay, max(own_s, 3600.0), own_s)


def test_an_own_delay_holds_for_every_kind_of_retry() -> None:
    slow = job(retries=3, failures=1, retry_delay_s=30.0)
    assert judge(slow, Outcome(kind=OutcomeKind.TIMED_OUT)).delay_s == 60.0
    assert judge(slow, Outcome(kind=OutcomeKind.TIMED_OUT)).text == "timed-out; retry 2 of 3 after 1m"
    assert judge_shortage(slow, SHORT, Growth(count=1)).delay_s == 30.0


# Out of memory


@pytest.mark.parametrize(
    ("growth", "text"),
    [
        (Growth(count=1, memory_mb=10_240.0), "retry with 10 GB"),
        (Growth(count=2, ram_mb=2048.0), "retry with 2 GB of RAM"),
        (Growth(count=3, is_alone=True), "retry alone on the largest GPU"),
        (Growth(count=1), "retry with more memory"),
    ],
)
def test_a_job_that_ran_out_of_memory_runs_again_with_more_and_uses_up_no_retry(growth: Growth, text: str) -> None:
    verdict = judge_shortage(job(), SHORT, growth)
    assert (verdict.event, verdict.counts, verdict.growth) == (JobEvent.RETRY, False, growth)
    assert text in verdict.text
    assert "CUDA out of memory" in verdict.text
    assert verdict.delay_s == 2.0 ** (growth.count - 1)


def test_a_job_that_more_memory_would_not_help_fails_and_the_text_says_why() -> None:
    verdict = judge_shortage(job(), SHORT, None, "needed at least 31 GB; the largest GPU has 24 GB")
    assert (verdict.event, verdict.counts, verdict.growth) == (JobEvent.FAIL, False, None)
    assert verdict.text == "needed at least 31 GB; the largest GPU has 24 GB"


# Every outcome has a next state


@pytest.mark.parametrize("kind", sorted(set(OutcomeKind) - {OutcomeKind.CANCELLED}))
@pytest.mark.parametrize("state", sorted(LIVE - {JobState.STOPPING}))
def test_every_outcome_of_a_live_job_has_a_next_state(state: JobState, kind: OutcomeKind) -> None:
    for retries in (0, 1):
        assert can(state, judge(job(retries=retries), Outcome(kind=kind)).event)
    for growth in (None, Growth(count=1)):
        assert can(state, judge_shortage(job(), SHORT, growth).event)


@pytest.mark.parametrize(
    "kind",
    [
        OutcomeKind.CANCELLED, OutcomeKind.TIMED_OUT, OutcomeKind.PREEMPTED, OutcomeKind.NOT_RESTORED,
        OutcomeKind.SUCCEEDED,
    ],
)  # fmt: skip
def test_every_outcome_of_a_stopping_job_has_a_next_state(kind: OutcomeKind) -> None:
    for retries in (0, 1):
        assert can(JobState.STOPPING, judge(job(retries=retries), Outcome(kind=kind)).event)
