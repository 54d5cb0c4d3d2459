"""Why an attempt is asked to stop, and the outcome that this gives it."""

from msgspec.structs import replace

from gpuyard.core.job.job import Attempt, Job, Outcome, OutcomeKind

STOP_REASONS = {
    OutcomeKind.CANCELLED: "cancelled",
    OutcomeKind.TIMED_OUT: "over its time limit",
    OutcomeKind.PREEMPTED: "preempted by an urgent job",
    OutcomeKind.NOT_RESTORED: "suspended, and could not be resumed",
    OutcomeKind.MEMORY_GUARD: "its GPU was about to run out of memory",
    OutcomeKind.HOST_GUARD: "the machine was about to run out of RAM",
}
# Begins the reason of a job that is being stopped.
STOPPING = "stopping: "
_GUARDS = (OutcomeKind.MEMORY_GUARD, OutcomeKind.HOST_GUARD)
_MAKE_ROOM = (OutcomeKind.PREEMPTED, *_GUARDS)


def outcome_after_stop(job: Job, attempt: Attempt, outcome: Outcome) -> Outcome:
    """Return the outcome of an attempt that ended with `outcome`: that of its stop, if it was asked to stop or was
    warned of its time limit."""
    # A preempted program that succeeded before it was stopped need not run again.
    had_succeeded = attempt.stopping in _MAKE_ROOM and outcome.kind is OutcomeKind.SUCCEEDED
    if attempt.stopping is not None and not had_succeeded:
        reason = _stop_reason(job, attempt.stopping)
        return replace(outcome, kind=attempt.stopping, reason=reason, error_line=None)
    if attempt.stopping is None and attempt.warned_at is not None and outcome.kind is OutcomeKind.FAILED:
        reason = f"{outcome.reason or outcome.kind} after the signal before its time limit"
        return replace(outcome, kind=OutcomeKind.TIMED_OUT, reason=reason)
    return outcome


def _stop_reason(job: Job, kind: OutcomeKind) -> str:
    """Return why an attempt was stopped. What a memory guard saw is recorded with the job."""
    if kind in _GUARDS and (job.reason or "").startswith(STOPPING):
        return (job.reason or "").removeprefix(STOPPING)
    return STOP_REASONS[kind]
