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
      whether a job may start.
    - `is_outdated`: the sample may not show memory that was freed, so nothing was started.
    - `needs_sample`: the end of an attempt is recorded when a newer sample shows whether its GPU failed.
    - `events`: events of this step and of user requests since the last one. `has_more_events`: the next step, which
      follows at once, has more.
    """

    wake_at: float | None
    waits_for_devices: bool
    waits_for_sample: bool
    started: int
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
