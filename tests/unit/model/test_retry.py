from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.model.job import Attempt, Growth, Job, Outcome, OutcomeKind, Started
from gpuyard.model.job_spec import JobSpec, OnReboot, RetryCause
from gpuyard.model.lease import Need
from gpuyard.model.lifecycle import LIVE, JobEvent, JobState, can
from gpuyard.model.retry import (
    after_reboot,
    died_with_the_machine,
    ended_before_reboot,
    judge,
    judge_shortage,
    retry_delay_s,
)

FAILURES = (
    OutcomeKind.FAILED, OutcomeKind.CANNOT_START, OutcomeKind.OUT_OF_MEMORY, OutcomeKind.TIMED_OUT,
    OutcomeKind.LOST, OutcomeKind.NOT_RESTORED,
)  # fmt: skip
SHORT = Outcome(kind=OutcomeKind.OUT_OF_MEMORY, status=1, reason="CUDA out of memory")


def job(retries: int = 0, failures: int = 0, **options: Any) -> Job:
    spec = JobSpec(command=("true",), cwd="/", environment={}, need=Need(), retries=retries, **options)
    return Job(id=1, spec=spec, state=JobState.RUNNING, priority=0, user="u", submitted_at=0.0, failures=failures)


def test_what_uses_up_no_retry() -> None:
    for kind, event in ((OutcomeKind.SUCCEEDED, JobEvent.SUCCEED), (OutcomeKind.CANCELLED, JobEvent.CANCEL)):
        verdict = judge(job(retries=3), Outcome(kind=kind))
        assert (verdict.event, verdict.counts) == (event, False)
    # An attempt that never started is queued again and uses up no retry.
    verdict = judge(job(retries=0), Outcome(kind=OutcomeKind.NEVER_STARTED))
    assert (verdict.event, verdict.counts, verdict.delay_s) == (JobEvent.REQUEUE, False, 0.0)
    # A preempted job is queued again and uses up no retry.
    verdict = judge(job(retries=0), Outcome(kind=OutcomeKind.PREEMPTED, reason="preempted by an urgent job"))
    assert (verdict.event, verdict.counts, verdict.delay_s) == (JobEvent.REQUEUE, False, 0.0)
    assert verdict.text == "preempted by an urgent job; queued again"


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
    assert (verdict.delay_s, verdict.text) == (4.0, "exit status 1; retry 3 of 3 after 4s")
    assert "retry 1 of 1 at once" in judge(job(retries=1), Outcome(kind=OutcomeKind.TIMED_OUT)).text
    slow = job(retries=3, failures=1, retry_delay_s=30.0)
    assert judge(slow, Outcome(kind=OutcomeKind.TIMED_OUT)).delay_s == 60.0
    assert judge(slow, Outcome(kind=OutcomeKind.TIMED_OUT)).text == "timed-out; retry 2 of 3 after 1m"
    assert judge_shortage(slow, SHORT, Growth(count=1)).delay_s == 30.0, "an own delay holds for every kind of retry"


@given(st.sampled_from(FAILURES), st.integers(0, 10_000))
def test_delays_double_up_to_the_longest_and_never_shrink(kind: OutcomeKind, failures: int) -> None:
    delay, following = retry_delay_s(kind, failures), retry_delay_s(kind, failures + 1)
    assert 0.0 <= delay <= following <= 600.0
    assert following == 2 * delay or following == retry_delay_s(kind, 10_000)


# What a job is retried after, and when

_CAUSE_OF = {OutcomeKind.TIMED_OUT: RetryCause.TIMEOUT, OutcomeKind.OUT_OF_MEMORY: RetryCause.OOM}


@given(st.sampled_from(FAILURES), st.sets(st.sampled_from(RetryCause)), st.booleans())
@example(kind=OutcomeKind.FAILED, named={RetryCause.DEVICE}, is_device_fault=True)
def test_a_job_is_retried_after_named_causes(kind: OutcomeKind, named: set[RetryCause], is_device_fault: bool) -> None:
    chosen = tuple(cause for cause in RetryCause if cause in named)
    verdict = judge(job(retries=1, retry_on=chosen), Outcome(kind=kind), is_device_fault=is_device_fault)
    causes = {_CAUSE_OF.get(kind, RetryCause.FAILED)}
    if is_device_fault or kind is OutcomeKind.NOT_RESTORED:
        causes.add(RetryCause.DEVICE)
    assert (verdict.event is JobEvent.RETRY) == bool(causes & named)
    assert verdict.counts
    assert ("not retried (--retry-on" in verdict.text) == (verdict.event is JobEvent.FAIL)


def test_a_shortage_that_is_not_retried_fails_with_its_reason() -> None:
    verdict = judge_shortage(job(retries=3, retry_on=(RetryCause.FAILED,)), SHORT, Growth(count=1))
    assert (verdict.event, verdict.growth) == (JobEvent.FAIL, None)
    assert verdict.text == "CUDA out of memory; not retried (--retry-on failed)"
    # A job that more memory would not help fails and the text says why.
    verdict = judge_shortage(job(), SHORT, None, "needed at least 31 GB; the largest GPU has 24 GB")
    assert (verdict.event, verdict.counts, verdict.growth) == (JobEvent.FAIL, False, None)
    assert verdict.text == "needed at least 31 GB; the largest GPU has 24 GB"


@given(st.sampled_from(FAILURES), st.floats(0.001, 1e6), st.integers(0, 10_000))
def test_an_own_delay_doubles_up_to_an_hour_or_to_itself(kind: OutcomeKind, own_s: float, failures: int) -> None:
    delay = retry_delay_s(kind, failures, own_s)
    assert retry_delay_s(kind, 0, own_s) == own_s
    assert own_s <= delay <= max(own_s, 3600.0)
    assert retry_delay_s(kind, failures + 1, own_s) in (2 * delay, max(own_s, 3600.0), own_s)


@pytest.mark.parametrize(
    ("growth", "text"),
    [
        (Growth(count=1, memory_mb=10_240.0), "retry with 10 GB"),
        (Growth(count=2, ram_mb=2048.0), "retry with 2 GB of RAM"),
        (Growth(count=3, is_alone=True), "retry alone on the largest GPU"),
        (Growth(count=1), "retry with more memory"),
    ],
)
def test_a_job_that_ran_out_of_memory_runs_again_with_more(growth: Growth, text: str) -> None:
    verdict = judge_shortage(job(), SHORT, growth)
    assert (verdict.event, verdict.counts, verdict.growth) == (JobEvent.RETRY, False, growth)
    assert text in verdict.text
    assert "CUDA out of memory" in verdict.text
    assert verdict.delay_s == 2.0 ** (growth.count - 1)


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


SPEC = JobSpec(command=("true",), cwd="/", environment={}, need=Need())
JOB = Job(id=17, spec=SPEC, state=JobState.RUNNING, priority=0, user="u", submitted_at=0.0)


def job_with(**fields: object) -> Job:
    return replace(JOB, spec=replace(SPEC, **fields))


@pytest.mark.parametrize(
    ("boot_of_attempt", "boot_now", "died"),
    [("a", "a", False), ("a", "b", True), (None, "b", False), ("a", None, False), (None, None, False)],
)
def test_an_attempt_of_another_boot_died_with_it(boot_of_attempt: str | None, boot_now: str | None, died: bool) -> None:
    attempt = Attempt(job_id=1, number=1, phase=Started(at=0.0, keeper_pid=9), boot_id=boot_of_attempt)
    assert died_with_the_machine(attempt, boot_now) is died


@pytest.mark.parametrize("kind", OutcomeKind)
def test_before_a_reboot_only_success_and_never_started_are_certain(kind: OutcomeKind) -> None:
    is_certain = kind in (OutcomeKind.SUCCEEDED, OutcomeKind.NEVER_STARTED)
    assert ended_before_reboot(Outcome(kind=kind)) is is_certain


@pytest.mark.parametrize(
    ("job", "event"),
    [
        (job_with(on_reboot=OnReboot.REQUEUE), JobEvent.REQUEUE),
        (job_with(on_reboot=OnReboot.HOLD), JobEvent.HOLD),
        (job_with(on_reboot=OnReboot.FAIL), JobEvent.FAIL),
        (job_with(on_reboot=OnReboot.HOLD, retries=3), JobEvent.HOLD),
        (job_with(on_reboot=OnReboot.FAIL, is_array=True), JobEvent.FAIL),
    ],
)
def test_a_job_follows_its_on_reboot_setting(job: Job, event: JobEvent) -> None:
    assert after_reboot(job).event is event


@pytest.mark.parametrize(
    ("job", "event"),
    [(job_with(), JobEvent.HOLD), (job_with(retries=1), JobEvent.REQUEUE), (job_with(is_array=True), JobEvent.REQUEUE)],
)
def test_by_default_only_repeatable_jobs_run_again(job: Job, event: JobEvent) -> None:
    assert after_reboot(job).event is event


def test_a_held_job_says_how_to_release_it() -> None:
    assert "`gpuyard release 17`" in after_reboot(job_with()).text


@pytest.mark.parametrize("on_reboot", OnReboot)
def test_a_reboot_uses_up_no_retry_of_a_job_that_runs_again(on_reboot: OnReboot) -> None:
    verdict = after_reboot(job_with(on_reboot=on_reboot))
    assert can(JobState.RUNNING, verdict.event)
    assert verdict.counts is (on_reboot is OnReboot.FAIL)
