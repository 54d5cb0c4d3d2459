"""What a new daemon makes of attempts that an earlier one left behind.

Those of this boot are watched on: their keepers live, or their ends are in the journal. Those of an earlier boot
died with the machine, and their jobs go the way that was asked for when they were submitted; but one that is known to
have succeeded, or never to have begun, is not made to run twice or to wait for a person. What runs elsewhere does not
care about our boots.
"""

from gpuyard.core.job.job import Attempt, Job, OnReboot, Outcome, OutcomeKind
from gpuyard.core.job.lifecycle import JobEvent
from gpuyard.core.job.retry import Verdict

# So many of its attempts may be lost, one after the other.
_MOST_LOST = 5
REBOOTED = Outcome(kind=OutcomeKind.LOST, reason="the machine was restarted while it ran")


def died_with_the_machine(attempt: Attempt, boot_id: str | None) -> bool:
    return attempt.boot_id is not None and boot_id is not None and attempt.boot_id != boot_id


def ended_before_reboot(outcome: Outcome) -> bool:
    """Whether the outcome can be believed: a failure may be the work of the shutdown, which asks programs to end."""
    return outcome.kind in (OutcomeKind.SUCCEEDED, OutcomeKind.NEVER_STARTED)


def after_loss(job: Job) -> Verdict:
    """For one that was lost elsewhere, with its node or its whole cluster, which is no fault of its own: it is run
    again unless somebody said otherwise, and held when that has happened too often."""
    wish = job.spec.on_reboot or OnReboot.REQUEUE
    if wish is OnReboot.FAIL:
        return Verdict(event=JobEvent.FAIL, counts=True, text="it was lost where it ran")
    if wish is OnReboot.HOLD or job.attempts - job.failures - job.growth.count > _MOST_LOST:
        hint = f"see what it had done, then `gpuyard release {job.id}`"
        return Verdict(event=JobEvent.HOLD, text=f"it was lost where it ran: {hint}")
    return Verdict(event=JobEvent.RETRY, text="it was lost where it ran; again at once")


def after_reboot(job: Job) -> Verdict:
    """Requeued where it was made to be run again; otherwise a person should look at it first."""
    spec = job.spec
    wish = spec.on_reboot or (OnReboot.REQUEUE if spec.retries or spec.is_array else OnReboot.HOLD)
    if wish is OnReboot.REQUEUE:
        return Verdict(event=JobEvent.REQUEUE, text="the machine was restarted; it is queued again")
    if wish is OnReboot.HOLD:
        hint = f"see what it had done, then `gpuyard release {job.id}`"
        return Verdict(event=JobEvent.HOLD, text=f"the machine was restarted while it ran: {hint}")
    return Verdict(event=JobEvent.FAIL, counts=True, text="the machine was restarted while it ran")
