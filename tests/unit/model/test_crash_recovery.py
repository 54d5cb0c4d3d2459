import pytest
from msgspec.structs import replace

from gpuyard.model.job import Attempt, Job, Outcome, OutcomeKind, Started
from gpuyard.model.job_spec import JobSpec, OnReboot
from gpuyard.model.lease import Need
from gpuyard.model.lifecycle import JobEvent, JobState, can
from gpuyard.model.retry import after_reboot, died_with_the_machine, ended_before_reboot

SPEC = JobSpec(command=("true",), cwd="/", environment={}, need=Need())
JOB = Job(id=17, spec=SPEC, state=JobState.RUNNING, priority=0, user="u", submitted_at=0.0)


def job_with(**fields: object) -> Job:
    return replace(JOB, spec=replace(SPEC, **fields))


@pytest.mark.parametrize(
    ("boot_of_attempt", "boot_now", "died"),
    [("a", "a", False), ("a", "b", True), (None, "b", False), ("a", None, False), (None, None, False)],
)
def test_only_an_attempt_of_a_known_other_boot_died_with_the_machine(
    boot_of_attempt: str | None, boot_now: str | None, died: bool
) -> None:
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
def test_every_setting_can_be_followed_and_a_reboot_uses_up_no_retry_of_a_job_that_runs_again(
    on_reboot: OnReboot,
) -> None:
    verdict = after_reboot(job_with(on_reboot=on_reboot))
    assert can(JobState.RUNNING, verdict.event)
    assert verdict.counts is (on_reboot is OnReboot.FAIL)
