import pytest
from msgspec.structs import replace

from gpuyard.core.job.crash_recovery import after_reboot, died_with_the_machine, ended_before_reboot
from gpuyard.core.job.job import Attempt, Job, JobSpec, OnReboot, Outcome, OutcomeKind
from gpuyard.core.job.lifecycle import JobEvent, JobState, can
from gpuyard.core.lease import Need

SPEC = JobSpec(command=("true",), cwd="/", environment={}, need=Need())
JOB = Job(id=17, spec=SPEC, state=JobState.RUNNING, priority=0, user="u", submitted_at=0.0)


def of(**said: object) -> Job:
    return replace(JOB, spec=replace(SPEC, **said))


@pytest.mark.parametrize(
    ("of_attempt", "now", "died"),
    [("a", "a", False), ("a", "b", True), (None, "b", False), ("a", None, False), (None, None, False)],
)
def test_only_an_attempt_of_a_known_other_boot_died_with_the_machine(
    of_attempt: str | None, now: str | None, died: bool
) -> None:
    attempt = Attempt(job_id=1, number=1, pid=9, boot_id=of_attempt, started_at=0.0)
    assert died_with_the_machine(attempt, now) is died


@pytest.mark.parametrize("kind", OutcomeKind)
def test_of_what_ended_before_a_reboot_only_success_and_no_beginning_are_believed(kind: OutcomeKind) -> None:
    is_believed = kind in (OutcomeKind.SUCCEEDED, OutcomeKind.NEVER_STARTED)
    assert ended_before_reboot(Outcome(kind=kind)) is is_believed


@pytest.mark.parametrize(
    ("job", "event"),
    [
        (of(on_reboot=OnReboot.REQUEUE), JobEvent.REQUEUE),
        (of(on_reboot=OnReboot.HOLD), JobEvent.HOLD),
        (of(on_reboot=OnReboot.FAIL), JobEvent.FAIL),
        (of(on_reboot=OnReboot.HOLD, retries=3), JobEvent.HOLD),
        (of(on_reboot=OnReboot.FAIL, is_array=True), JobEvent.FAIL),
    ],
)
def test_a_job_goes_the_way_that_was_asked_for(job: Job, event: JobEvent) -> None:
    assert after_reboot(job).event is event


@pytest.mark.parametrize(
    ("job", "event"),
    [(of(), JobEvent.HOLD), (of(retries=1), JobEvent.REQUEUE), (of(is_array=True), JobEvent.REQUEUE)],
)
def test_unasked_only_what_was_made_to_be_run_again_is_run_again(job: Job, event: JobEvent) -> None:
    assert after_reboot(job).event is event


def test_a_held_job_tells_how_to_go_on() -> None:
    assert "`gpuyard release 17`" in after_reboot(of()).text


@pytest.mark.parametrize("wish", OnReboot)
def test_every_wish_can_be_followed_and_a_reboot_uses_up_no_retry_of_what_goes_on(wish: OnReboot) -> None:
    verdict = after_reboot(of(on_reboot=wish))
    assert can(JobState.RUNNING, verdict.event)
    assert verdict.counts is (wish is OnReboot.FAIL)
