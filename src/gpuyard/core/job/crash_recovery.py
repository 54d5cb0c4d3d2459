"""What a new daemon does with attempts that an earlier daemon left behind.

- Attempts of this boot are watched further: their keepers are alive, or the journal has their ends.
- Attempts of an earlier boot died with the machine. Their jobs follow `on_reboot`. Exception: an attempt that is known
  to have succeeded, or never to have started, is not run twice and does not wait for a person.
- Attempts on other machines do not depend on boots of this one.
"""

from gpuyard.core.job.job import Attempt, Job, OnReboot, Outcome, OutcomeKind
from gpuyard.core.job.lifecycle import JobEvent
from gpuyard.core.job.retry import Verdict

# A job is held once more attempts than this were lost on another machine.
_MAX_LOST = 5
_REBOOTED = "the machine was restarted while it ran"
REBOOTED = Outcome(kind=OutcomeKind.LOST, reason=_REBOOTED)


def died_with_the_machine(attempt: Attempt, boot_id: str | None) -> bool:
    return attempt.boot_id is not None and boot_id is not None and attempt.boot_id != boot_id


def ended_before_reboot(outcome: Outcome) -> bool:
    """Return whether the outcome is certain. A failure is not: the shutdown itself may have ended the program."""
    return outcome.kind in (OutcomeKind.SUCCEEDED, OutcomeKind.NEVER_STARTED)


def after_loss(job: Job) -> Verdict:
    """Decide for an attempt that was lost on another machine, with its node or the whole cluster.

    The job is not at fault: it runs again unless `on_reboot` says otherwise, and is held once that happened too often.
    """
    lost_too_often = job.attempts - job.failures - job.growth.count > _MAX_LOST
    wish = OnReboot.HOLD if lost_too_often and job.spec.on_reboot is not OnReboot.FAIL else job.spec.on_reboot
    return _follow(job, wish or OnReboot.REQUEUE, JobEvent.RETRY, "lost with its node", "runs again at once")


def after_reboot(job: Job) -> Verdict:
    """Decide for an attempt that died with this machine.

    By default, jobs that are made to run again (retries or an array) are requeued; others are held for a person to
    look at first.
    """
    is_repeatable = job.spec.retries or job.spec.is_array
    wish = job.spec.on_reboot or (OnReboot.REQUEUE if is_repeatable else OnReboot.HOLD)
    return _follow(job, wish, JobEvent.REQUEUE, _REBOOTED, "queued again")


def _follow(job: Job, wish: OnReboot, again: JobEvent, what_happened: str, what_next: str) -> Verdict:
    if wish is OnReboot.REQUEUE:
        return Verdict(event=again, text=f"{what_happened}; {what_next}")
    if wish is OnReboot.HOLD:
        hint = f"check what it has done, then `gpuyard release {job.id}`"
        return Verdict(event=JobEvent.HOLD, text=f"{what_happened}: {hint}")
    return Verdict(event=JobEvent.FAIL, counts=True, text=what_happened)
