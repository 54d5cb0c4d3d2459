"""Foreign load: how busy processes without a lease keep a device. And smoothed figures and gates, so that a single
spike or lull decides nothing.
"""

from collections.abc import Sequence

from msgspec import Struct

from gpuyard.model.lease import Share
from gpuyard.model.machine_snapshot import Device, Process
from gpuyard.policy import numbers


class Smoothed(Struct, frozen=True, kw_only=True):
    """The average, and the time of the last known reading."""

    value: float | None = None
    at: float | None = None


def smooth(before: Smoothed, reading: float | None, now: float, half_life_s: float) -> Smoothed:
    """Return the average with one more reading, taken at `now` on a monotonic clock."""
    if before.value is None or before.at is None:
        return before if reading is None else Smoothed(value=reading, at=now)
    elapsed = now - before.at
    if reading is None:
        return Smoothed() if elapsed > numbers.FORGET_AFTER_HALF_LIVES * half_life_s else before
    if half_life_s <= 0:
        return Smoothed(value=reading, at=now)
    kept = 0.5 ** (max(0.0, elapsed) / half_life_s)
    return Smoothed(value=kept * before.value + (1 - kept) * reading, at=now)


def is_above(figure: float | None, limit: float | None, margin: float, *, was_above: bool) -> bool:
    """Return whether the figure exceeds the limit, or did and is not below it by a margin yet. Unknown: False."""
    if figure is None or limit is None:
        return False
    return figure > (limit - margin if was_above else limit)


def is_below(figure: float | None, limit: float | None, margin: float, *, was_below: bool) -> bool:
    """Return whether the figure is below the limit, or was and is not above it by a margin yet. Unknown: False."""
    if figure is None or limit is None:
        return False
    return figure < (limit + margin if was_below else limit)


class SteadyGate(Struct, frozen=True, kw_only=True):
    """Closes when a figure exceeds its limit. `within_since`: since when the figure of a closed gate is within."""

    is_closed: bool = False
    within_since: float | None = None


def judge_steadily(gate: SteadyGate, is_within: bool | None, now: float, steady_s: float) -> SteadyGate:  # noqa: FBT001
    """Reopen after `steady_s` seconds continuously within the limit. An unknown figure opens the gate."""
    if is_within is None:
        return SteadyGate()
    if not is_within:
        return SteadyGate(is_closed=True)
    if not gate.is_closed:
        return gate
    since = now if gate.within_since is None else min(gate.within_since, now)
    return SteadyGate() if now - since >= steady_s else SteadyGate(is_closed=True, within_since=since)


class ForeignProcess(Struct, frozen=True, kw_only=True):
    """A process that uses a device without a lease on it. `user` is None where the system hides it."""

    process: Process
    user: str | None = None


class ForeignLoad(Struct, frozen=True, kw_only=True):
    """How busy foreign processes keep a device, and those that are listed, the busiest first."""

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

    def busyness(foreign: ForeignProcess) -> tuple[float, float, int]:
        process = foreign.process
        return -(process.utilization_percent or 0.0), -(process.memory_mb or 0.0), process.pid

    average = smooth(before.average, reading, now, numbers.FOREIGN_HALF_LIFE_S)
    gate_limit = limit if limit is not None and limit < 100.0 else None
    high_at = before.high_at
    if is_above(reading, gate_limit, numbers.FOREIGN_MARGIN_PERCENT, was_above=True):
        high_at = now
    elif not processes and reading is not None and high_at is not None and now - high_at >= numbers.FOREIGN_ENDED_S:
        average, high_at = Smoothed(value=reading, at=now), None
    return ForeignLoad(
        average=average,
        is_over=is_above(average.value, gate_limit, numbers.FOREIGN_MARGIN_PERCENT, was_above=before.is_over),
        processes=tuple(sorted(processes, key=busyness)),
        high_at=high_at,
    )


def read_foreign_load(device: Device, processes: Sequence[ForeignProcess], own: Sequence[Share]) -> float | None:
    """Return the foreign load in percent, if known. `own` are the shares of leases since the previous reading."""
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
    return not device.processes and (used_mb is None or used_mb >= numbers.DRIVER_MB)
