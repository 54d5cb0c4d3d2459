"""Foreign load: how busy processes without a lease keep a device.

- Where there are no leases, all of a device's utilization is the strangers'. Figures of single processes lag behind it.
- Beside leases, the figures of the strangers are added up, where the driver reports the utilization of each process.
- Elsewhere the device's utilization counts while strangers hold memory there, less what our own leases explain. A lease
  of unknown load may explain all of it.
- A device without strangers has no foreign load, however busy it was a moment ago.
- The figure is smoothed, and a device that is over the bound stays so until it is well below: one spike or one lull
  decides nothing.
"""

from collections.abc import Sequence

from msgspec import Struct

from gpuyard.core.lease import Share
from gpuyard.core.scheduling.load_gates import Gate, Smoothed, judge_above, smooth
from gpuyard.core.snapshot import Device, Process

# A screen is not worth a detour.
IDLE_PERCENT = 10.0
HALF_LIFE_S = 5.0
_MARGIN_PERCENT = 10.0
# Drivers keep a little memory of a device that no process uses.
_NOBODY_MB = 64.0


class ForeignProcess(Struct, frozen=True, kw_only=True):
    """A process that uses a device without a lease on it. `user` is None where the system does not tell."""

    process: Process
    user: str | None = None


class ForeignLoad(Struct, frozen=True, kw_only=True):
    """How busy strangers keep one device, and who they are, the busiest first."""

    average: Smoothed = Smoothed()
    gate: Gate = Gate()
    strangers: tuple[ForeignProcess, ...] = ()

    @property
    def percent(self) -> float:
        return self.average.value or 0.0

    @property
    def is_over(self) -> bool:
        """Whether the load is above the bound, or was and is not well below yet."""
        return self.gate.is_closed


NO_FOREIGN_LOAD = ForeignLoad()


def follow_foreign_load(
    before: ForeignLoad, reading: float | None, strangers: Sequence[ForeignProcess], now: float, bound: float | None
) -> ForeignLoad:
    """Return the load with one more reading. A bound of None, or of 100 and more, is never exceeded."""
    average = smooth(before.average, reading, now, HALF_LIFE_S)
    limit = bound if bound is not None and bound < 100.0 else None
    return ForeignLoad(
        average=average,
        gate=judge_above(before.gate, average.value, limit, _MARGIN_PERCENT),
        strangers=tuple(sorted(strangers, key=_busiest_first)),
    )


def read_foreign_load(device: Device, strangers: Sequence[ForeignProcess], own: Sequence[Share]) -> float | None:
    """Return the foreign load in percent by this reading, or None where it is unknown.

    `own` are the shares of leases on the device, those that ended since the reading before included.
    """
    known = [stranger.process.utilization_percent for stranger in strangers]
    figures = [figure for figure in known if figure is not None]
    if known and len(figures) == len(known):
        seen = 0.0 if own else device.utilization_percent or 0.0
        return min(100.0, max(seen, sum(figures)))
    if device.utilization_percent is None:
        return None
    explained = sum(100.0 if share.load_percent is None else share.load_percent for share in own)
    return max(0.0, device.utilization_percent - explained)


def may_have_strangers(device: Device) -> bool:
    """Whether processes may be on the device that the driver does not list."""
    return device.processes is None and (device.memory_used_mb or 0.0) >= _NOBODY_MB


def _busiest_first(stranger: ForeignProcess) -> tuple[float, float, int]:
    process = stranger.process
    return -(process.utilization_percent or 0.0), -(process.memory_mb or 0.0), process.pid
