"""Queue time: the time by which the queue decides. It never jumps, whatever happens to the wall clock.

Queue time = `offset` + seconds since the machine booted (CLOCK_BOOTTIME, which counts the time asleep). On a new boot
it continues by the wall clock, and never before the last stored time. Wall time = queue time + `shift`. One shift
applies to a whole boot: the wall clock of now says when things happened, also those before the clock was corrected. So
"started 3 minutes ago" is right after any step. Earlier boots keep the last shift that was seen in them.
"""

from msgspec import Struct
from msgspec.structs import replace

# A change of the shift by less than this is not a step: both clocks were not read at the same moment.
STEP_S = 0.5


class BootTime(Struct, frozen=True, kw_only=True):
    """The shift of the queue times from `since` on, up to the next boot."""

    since: float
    shift: float


class QueueTime(Struct, frozen=True, kw_only=True):
    """What is stored of the clock. `boot` identifies the boot of the last daemon; the last of `boots` is that boot."""

    boot: str
    offset: float
    boots: tuple[BootTime, ...]

    @property
    def shift(self) -> float:
        """What the wall clock is ahead of queue time."""
        return self.boots[-1].shift

    def to_wall(self, at: float) -> float:
        return at + next((each.shift for each in reversed(self.boots) if each.since <= at), self.boots[0].shift)

    def from_wall(self, at: float) -> float:
        found = (at - each.shift for each in reversed(self.boots) if at - each.shift >= each.since)
        return next(found, at - self.boots[0].shift)

    def noticing(self, since_boot: float, wall: float) -> "QueueTime":
        """Return the record after a look at both clocks: itself, unless the wall clock was stepped since the last."""
        shift = wall - (self.offset + since_boot)
        if abs(shift - self.shift) < STEP_S:
            return self
        return replace(self, boots=(*self.boots[:-1], replace(self.boots[-1], shift=shift)))


def start_queue_time(
    before: QueueTime | None, boot: str, since_boot: float, wall: float, last: float | None
) -> QueueTime:
    """Return the record for a daemon that starts now. `boot` may be empty; `last` is the latest stored queue time."""
    is_same_boot = before is not None and boot and before.boot == boot
    if before is not None and is_same_boot and (last is None or last <= before.offset + since_boot):
        return before.noticing(since_boot, wall)
    now = wall - (0.0 if before is None else before.shift)
    if last is not None:
        now = max(now, last)
    past: list[BootTime] = []
    for each in () if before is None else before.boots:  # without boots whose shift is that of the boot before
        if not past or abs(each.shift - past[-1].shift) >= STEP_S:
            past.append(each)
    # Before the last hundred boots, the oldest shift applies.
    boots = (*past, BootTime(since=now, shift=wall - now))[-100:]
    return QueueTime(boot=boot, offset=now - since_boot, boots=boots)
