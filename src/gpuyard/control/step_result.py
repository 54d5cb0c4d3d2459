"""What a step of the controller returns."""

from collections.abc import Sequence

from msgspec import Struct

from gpuyard.core.job.job import PublishedEvent
from gpuyard.core.scheduling.plan import WaitingJob
from gpuyard.core.scheduling.wait_reasons import NOTICED_BY_QUEUE, ReasonKind


class Step(Struct, frozen=True, kw_only=True):
    """The result of a step.

    - `wake_at`: when the next step is due even if nothing happens.
    - `waits_for_devices`: a job waits for something that others hold. `waits_for_sample`: only a new sample can show
      whether a job may start. `waits_for_others`: the end of another program's lease, or of a drain, may let it.
    - `is_outdated`: the sample may not show memory that was freed, so nothing was started.
    - `needs_sample`: the end of an attempt is recorded when a newer sample shows whether its GPU failed.
    - `events`: events of this step and of user requests since the last one. `has_more_events`: the next step, which
      follows at once, has more.
    """

    wake_at: float | None
    waits_for_devices: bool
    waits_for_sample: bool
    started: int
    waits_for_others: bool = False
    is_outdated: bool = False
    needs_sample: bool = False
    events: tuple[PublishedEvent, ...] = ()
    has_more_events: bool = False


def awaited(waiting: Sequence[WaitingJob]) -> tuple[bool, bool]:
    """Return whether jobs wait for a lease to end, and whether they wait for something that only a sample shows."""
    reasons = [reason for each in waiting for reason in each.reasons]
    for_lease = any(reason.is_leased for reason in reasons)
    kinds = {reason.kind for reason in reasons if not reason.is_leased}
    return for_lease, not kinds <= NOTICED_BY_QUEUE or (ReasonKind.TOO_FEW in kinds and not for_lease)


def are_held_by_others(waiting: Sequence[WaitingJob], pid: int) -> bool:
    """Return whether jobs wait for a device that a process other than this daemon holds, or that is drained."""
    for each in waiting:
        for reason in each.reasons:
            if reason.kind is ReasonKind.CLOSED:
                return True
            for holder in reason.holders:
                if holder.pid != pid:
                    return True
    return False
