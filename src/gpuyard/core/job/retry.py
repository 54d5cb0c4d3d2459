"""What an attempt's outcome leads to: done, again after a while, or given up. The decision is a value.

Running out of memory uses up none of the job's retries: it is run again with more, a few times. Nor does making room
for another.
"""

from msgspec import Struct

from gpuyard.core.job.job import Growth, Job, Outcome, OutcomeKind
from gpuyard.core.job.lifecycle import JobEvent
from gpuyard.core.units import format_size

# The first pause and the longest, by cause: a program that fails may need what others are about to make; one that
# could not start needs a person; one that was lost or took too long needs no pause at all.
_PAUSES_S = {
    OutcomeKind.FAILED: (1.0, 300.0),
    OutcomeKind.CANNOT_START: (10.0, 600.0),
    OutcomeKind.OUT_OF_MEMORY: (1.0, 60.0),
    OutcomeKind.TIMED_OUT: (0.0, 0.0),
    OutcomeKind.LOST: (0.0, 60.0),
    OutcomeKind.NOT_RESTORED: (0.0, 60.0),
}


class Verdict(Struct, frozen=True, kw_only=True):
    """`counts` says whether the attempt uses up one of the job's retries; `growth` is what it is given from now on."""

    event: JobEvent
    delay_s: float = 0.0
    counts: bool = False
    text: str = ""
    growth: Growth | None = None


def judge(job: Job, outcome: Outcome) -> Verdict:
    """What becomes of a job whose attempt has ended so."""
    if outcome.kind is OutcomeKind.NEVER_STARTED:
        return Verdict(event=JobEvent.REQUEUE, text="it had not begun, and is queued again")
    if outcome.kind is OutcomeKind.CANCELLED:
        return Verdict(event=JobEvent.CANCEL, text="cancelled")
    if outcome.kind is OutcomeKind.PREEMPTED:
        return Verdict(event=JobEvent.REQUEUE, text=f"{outcome.reason}; it is queued again")
    if outcome.kind is OutcomeKind.SUCCEEDED:
        return Verdict(event=JobEvent.SUCCEED, text="succeeded")
    why = outcome.reason or outcome.kind
    left = job.spec.retries - job.failures
    if left <= 0:
        return Verdict(event=JobEvent.FAIL, counts=True, text=why)
    delay_s = pause_s(outcome.kind, job.failures)
    when = f"in {delay_s:g} s" if delay_s else "at once"
    return Verdict(
        event=JobEvent.RETRY, delay_s=delay_s, counts=True, text=f"{why}; again {when}, and {left - 1} more after that"
    )


def judge_shortage(outcome: Outcome, growth: Growth | None, largest_mb: float | None) -> Verdict:
    """For one that ran out of memory: `growth` is what it is given next, `None` where it was given all there is."""
    why = outcome.reason or outcome.kind
    if growth is None:
        most = f", and alone: the largest GPU has {format_size(largest_mb)}" if largest_mb is not None else ""
        return Verdict(event=JobEvent.FAIL, text=f"it was run again with more{most}; {why}")
    delay_s = pause_s(OutcomeKind.OUT_OF_MEMORY, growth.count - 1)
    return Verdict(event=JobEvent.RETRY, delay_s=delay_s, text=f"again {_with_what(growth)}; {why}", growth=growth)


def _with_what(growth: Growth) -> str:
    if growth.is_alone:
        return "alone on the largest GPU"
    if growth.memory_mb is not None:
        return f"with {format_size(growth.memory_mb)}"
    return f"with {format_size(growth.ram_mb)} of RAM" if growth.ram_mb is not None else "with more room"


def pause_s(kind: OutcomeKind, failures: int) -> float:
    """Twice as long each time, up to the longest."""
    first, longest = _PAUSES_S[kind]
    return min(longest, first * float(2 ** min(failures, 32)))
