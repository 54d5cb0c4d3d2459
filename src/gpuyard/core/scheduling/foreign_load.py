"""Foreign load: how busy foreign processes (processes outside gpuyard, without a lease) keep a device.

- On a device without leases, all utilization is foreign. Figures of single processes lag behind it.
- Beside leases, the figures of the foreign processes are added up, where the driver reports each process's utilization.
- Elsewhere the device's utilization counts while foreign processes hold memory there, less what our own leases explain.
  A lease of unknown load may explain all of it.
- Where the driver lists no process, as in containers, memory in use shows that some may run. An idle driver holds
  memory, too, and keeps the device idle.
- A device without foreign processes has no foreign load, however busy it was a moment ago.
- The figure is smoothed, and a device above the limit counts as above until it is well below: a single spike or lull
  decides nothing. The end of a process that is not listed shows only in the load: once that was well below for
  `FOREIGN_ENDED_S`, the device is open.
"""

from collections.abc import Sequence

from msgspec import Struct

from gpuyard.core.lease import Share
from gpuyard.core.scheduling.load_gates import Smoothed, is_above, smooth
from gpuyard.core.scheduling.numbers import (
    DRIVER_MB,
    FOREIGN_ENDED_S,
    FOREIGN_HALF_LIFE_S,
    FOREIGN_MARGIN_PERCENT,
)
from gpuyard.core.snapshot import Device, Process


class ForeignProcess(Struct, frozen=True, kw_only=True):
    """A process that uses a device without a lease on it. `user` is None where the system hides it."""

    process: Process
    user: str | None = None


class ForeignLoad(Struct, frozen=True, kw_only=True):
    """How busy foreign processes keep a device, and these processes, the busiest first; none where they are not
    listed."""

    average: Smoothed = Smoothed()
    is_over: bool = False  # the load is above the limit, or was and is not well below yet
    processes: tuple[ForeignProcess, ...] = ()
    high_at: float | None = None  # the time of the last reading that was not well below the limit

    @property
    def percent(self) -> float:
        return self.average.value or 0.0


NO_FOREIGN_LOAD = ForeignLoad()


def follow_foreign_load(
    before: ForeignLoad, reading: float | None, processes: Sequence[ForeignProcess], now: float, limit: float | None
) -> ForeignLoad:
    """Return the load with one more reading. A limit of None, or of 100 and more, is never exceeded."""
    average = smooth(before.average, reading, now, FOREIGN_HALF_LIFE_S)
    gate_limit = limit if limit is not None and limit < 100.0 else None
    high_at = before.high_at
    if is_above(reading, gate_limit, FOREIGN_MARGIN_PERCENT, was_above=True):
        high_at = now
    elif not processes and reading is not None and high_at is not None and now - high_at >= FOREIGN_ENDED_S:
        average, high_at = Smoothed(value=reading, at=now), None
    return ForeignLoad(
        average=average,
        is_over=is_above(average.value, gate_limit, FOREIGN_MARGIN_PERCENT, was_above=before.is_over),
        processes=tuple(sorted(processes, key=_busiest_first)),
        high_at=high_at,
    )


def read_foreign_load(device: Device, processes: Sequence[ForeignProcess], own: Sequence[Share]) -> float | None:
    """Return the foreign load of this reading in percent, or None where it is unknown.

    own: the shares of leases on the device, including leases that ended since the previous reading.
    """
    known = [each.process.utilization_percent for each in processes]
    figures = [figure for figure in known if figure is not None]
    if known and len(figures) == len(known):
        measured = 0.0 if own else device.utilization_percent or 0.0
        return min(100.0, max(measured, sum(figures)))
    if device.utilization_percent is None:
        return None
    explained = sum(100.0 if share.load_percent is None else share.load_percent for share in own)
    return max(0.0, device.utilization_percent - explained)


def may_have_unlisted_processes(device: Device) -> bool:
    """Return whether the driver lists no process, and more memory is in use than it may hold itself, or unknown."""
    used_mb = device.memory_used_mb
    return not device.processes and (used_mb is None or used_mb >= DRIVER_MB)


def _busiest_first(foreign: ForeignProcess) -> tuple[float, float, int]:
    process = foreign.process
    return -(process.utilization_percent or 0.0), -(process.memory_mb or 0.0), process.pid
