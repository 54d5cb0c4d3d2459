"""What follows from an attempt's outcome: success, another attempt after a delay, or failure. The decision is a value.

- Only failures use up retries, and only those that `retry_on` names are retried. A job that ran out of memory runs
  again with more, unless it is known to be too large; one that was preempted, or stopped by a guard, is queued again.
- A job that failed with a fault of its GPU is queued again, up to three times: the program itself may cause the fault.
- Attempts of an earlier boot died with the machine, and their jobs follow `on_reboot`; one that is known to have
  succeeded, or never to have started, is not run twice and does not wait for a person.
"""

from collections.abc import Sequence

from msgspec import Struct

from gpuyard.errors import UserError
from gpuyard.model.job import Attempt, Growth, Job, Outcome, OutcomeKind
from gpuyard.model.job_spec import OnReboot, RetryCause
from gpuyard.model.lifecycle import JobEvent
from gpuyard.model.units import format_duration, format_size

# First and longest delay, by outcome. A failed program may need the output of other jobs; a program that cannot start
# needs a person; after a loss or a timeout no delay is needed.
_DELAYS_S = {
    OutcomeKind.FAILED: (1.0, 300.0),
    OutcomeKind.CANNOT_START: (10.0, 600.0),
    OutcomeKind.OUT_OF_MEMORY: (1.0, 60.0),
    OutcomeKind.TIMED_OUT: (0.0, 0.0),
    OutcomeKind.LOST: (0.0, 60.0),
    OutcomeKind.NOT_RESTORED: (0.0, 60.0),
    OutcomeKind.DEVICE_FAULT: (0.0, 60.0),
}
_CAUSES = {
    OutcomeKind.TIMED_OUT: {RetryCause.TIMEOUT},
    OutcomeKind.OUT_OF_MEMORY: {RetryCause.OOM},
    OutcomeKind.NOT_RESTORED: {RetryCause.FAILED, RetryCause.DEVICE},
    OutcomeKind.DEVICE_FAULT: {RetryCause.DEVICE},
}
REBOOTED = Outcome(kind=OutcomeKind.LOST, reason="the machine was restarted while it ran")


def parse_causes(texts: Sequence[str], retries: int) -> tuple[RetryCause, ...]:
    """Parse `--retry-on`: what a job is retried after, by default everything."""
    words = [word.strip() for text in texts for word in text.split(",") if word.strip()]
    unknown = next((word for word in words if word not in tuple(RetryCause)), None)
    if unknown is not None or (not words and texts):
        raise UserError(f"--retry-on cannot be '{unknown or ''}'", hint=f"name some of {', '.join(RetryCause)}")
    if set(words) - {RetryCause.OOM} and not retries:
        raise UserError(
            f"--retry-on {','.join(words)} has no effect with --retries 0",
            hint="give --retries, such as 3; a retry with more memory (oom) needs none",
        )
    return tuple(cause for cause in RetryCause if not words or cause in words)


class Verdict(Struct, frozen=True, kw_only=True):
    event: JobEvent
    delay_s: float = 0.0
    counts: bool = False  # the attempt uses up one of the job's retries
    text: str = ""
    note: str = ""  # follows the text in the reason of the job, also if it has succeeded
    growth: Growth | None = None  # what the job gets from now on
    keeps_place: bool = False  # it waits in the queue as if it had never been handed over


def judge(job: Job, outcome: Outcome, *, is_device_fault: bool = False) -> Verdict:
    """Decide what follows. `is_device_fault`: the program failed because of its GPU."""
    if outcome.kind is OutcomeKind.NEVER_STARTED:
        return Verdict(event=JobEvent.REQUEUE, text=": ".join(filter(None, ("not started", outcome.reason))))
    if outcome.kind is OutcomeKind.CANCELLED:
        return Verdict(event=JobEvent.CANCEL, text="cancelled")
    if outcome.kind in (OutcomeKind.PREEMPTED, OutcomeKind.MEMORY_GUARD, OutcomeKind.HOST_GUARD):
        return Verdict(event=JobEvent.REQUEUE, text=f"{outcome.reason}; queued again")
    if outcome.kind is OutcomeKind.SUCCEEDED:
        return Verdict(event=JobEvent.SUCCEED, text="succeeded")
    return _judge_failure(job, outcome, is_device_fault=is_device_fault)


def _judge_failure(job: Job, outcome: Outcome, *, is_device_fault: bool) -> Verdict:
    why = outcome.reason or outcome.kind
    if job.failures >= job.spec.retries:
        return Verdict(event=JobEvent.FAIL, counts=True, text=why)
    causes = _CAUSES.get(outcome.kind, {RetryCause.FAILED}) | ({RetryCause.DEVICE} if is_device_fault else set())
    if causes.isdisjoint(job.spec.retry_on):
        return Verdict(event=JobEvent.FAIL, counts=True, text=_not_retried(job, why))
    delay_s = retry_delay_s(outcome.kind, job.failures, job.spec.retry_delay_s)
    when = f"after {format_duration(delay_s)}" if delay_s else "at once"
    number = f"retry {job.failures + 1} of {job.spec.retries}"
    return Verdict(event=JobEvent.RETRY, delay_s=delay_s, counts=True, text=f"{why}; {number} {when}")


def after_device_fault(job: Job, outcome: Outcome, faults_before: int) -> tuple[Outcome, Verdict]:
    """Decide, and return the outcome to record, after a fault of its GPU; `faults_before` attempts had one, too."""
    why = outcome.reason or outcome.kind
    ended = Outcome(kind=OutcomeKind.DEVICE_FAULT, status=outcome.status, reason=why)
    if RetryCause.DEVICE not in job.spec.retry_on:
        return ended, Verdict(event=JobEvent.FAIL, counts=True, text=_not_retried(job, why))
    if faults_before < 3:
        return ended, Verdict(event=JobEvent.REQUEUE, text=f"{why}; queued again, no retry used up")
    return outcome, judge(job, outcome, is_device_fault=True)


def _not_retried(job: Job, why: str) -> str:
    return f"{why}; not retried (--retry-on {','.join(job.spec.retry_on)})"


def judge_shortage(job: Job, outcome: Outcome, growth: Growth | None, hopeless: str | None = None) -> Verdict:
    """Decide for a job that ran out of memory. `growth` is what it gets next, or `hopeless` says why none helps."""
    why = outcome.reason or outcome.kind
    if RetryCause.OOM not in job.spec.retry_on:
        return Verdict(event=JobEvent.FAIL, counts=True, text=_not_retried(job, why))
    if growth is None:
        return Verdict(event=JobEvent.FAIL, text=hopeless or f"out of memory again: {why}")
    delay_s = retry_delay_s(OutcomeKind.OUT_OF_MEMORY, growth.count - 1, job.spec.retry_delay_s)
    ram = f"{format_size(growth.ram_mb)} of RAM" if growth.ram_mb is not None else "more memory"
    how = f"with {ram if growth.memory_mb is None else format_size(growth.memory_mb)}"
    how = "alone on the largest GPU" if growth.is_alone else how
    return Verdict(event=JobEvent.RETRY, delay_s=delay_s, text=f"retry {how}; {why}", growth=growth)


def retry_delay_s(kind: OutcomeKind, failures: int, own_s: float | None = None) -> float:
    """Return the delay before the next attempt: it doubles with each failure. `own_s` is the user's first delay."""
    first, longest = _DELAYS_S[kind] if own_s is None else (own_s, max(own_s, 3600.0))
    return min(longest, first * float(2 ** min(failures, 32)))


def died_with_the_machine(attempt: Attempt, boot_id: str | None) -> bool:
    return attempt.boot_id is not None and boot_id is not None and attempt.boot_id != boot_id


def ended_before_reboot(outcome: Outcome) -> bool:
    """Return whether the outcome is certain. A failure is not: the shutdown itself may have ended the program."""
    return outcome.kind in (OutcomeKind.SUCCEEDED, OutcomeKind.NEVER_STARTED)


def after_loss(job: Job, lost_before: int) -> Verdict:
    """Decide for an attempt that was lost on another machine, as `lost_before` others were. The job is not at fault: it
    runs again unless `on_reboot` says otherwise, and is held once that happened too often."""
    wish = OnReboot.HOLD if lost_before >= 5 and job.spec.on_reboot is not OnReboot.FAIL else job.spec.on_reboot
    return _follow(job, wish or OnReboot.REQUEUE, JobEvent.RETRY, "lost with its node", "runs again at once")


def after_reboot(job: Job) -> Verdict:
    """Decide for an attempt that died with this machine: jobs that are not made to run again wait for a person."""
    is_repeatable = job.spec.retries or job.spec.is_array
    wish = job.spec.on_reboot or (OnReboot.REQUEUE if is_repeatable else OnReboot.HOLD)
    return _follow(job, wish, JobEvent.REQUEUE, REBOOTED.reason or "", "queued again")


def _follow(job: Job, wish: OnReboot, again: JobEvent, what_happened: str, what_next: str) -> Verdict:
    if wish is OnReboot.REQUEUE:
        return Verdict(event=again, text=f"{what_happened}; {what_next}")
    if wish is OnReboot.HOLD:
        hint = f"check what it has done, then `gpuyard release {job.id}`"
        return Verdict(event=JobEvent.HOLD, text=f"{what_happened}: {hint}")
    return Verdict(event=JobEvent.FAIL, counts=True, text=what_happened)
