"""Checks of a soak: pure functions over what was read and written down during it, none of it by the daemon.

A program notes its start a moment after the decision to start it. So a start has crossed a threshold only if the
threshold was crossed at every moment of the last `WINDOW_S` seconds before it; a start on a busy machine takes some of
these. Each check returns violations as texts, with the figures.
"""

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from tests.pressure.watch import MachineReading

WINDOW_S = 5.0
# CPU load is smoothed with a half-life of 5 s: it is above any limit of up to 75% after this time of full load.
CPU_WINDOW_S, CPU_FULL_PERCENT = 15.0, 95.0
_CPU_STEP_S = 1.0
# RAM of interpreters, of the page cache and of programs that start meanwhile.
_TOLERANCE_MB = 96.0
_ROUNDING_MB = 1.0


class ProgramRun(Struct, frozen=True, kw_only=True):
    """A program that ran, by its own evidence: from its start to its last sign of life, what it was promised (MB of RAM
    and of each device, CPUs), the disks that it needs, and what RAM it held when."""

    run: str
    start: float
    last: float
    is_job: bool
    ram_mb: float = 0.0
    vram_mb: float = 0.0
    cpus: float = 0.0
    devices: tuple[str, ...] = ()
    disks: Mapping[str, float] = {}  # by name: how many MB have to be free
    held: tuple[tuple[float, float], ...] = ()

    def held_mb(self, at: float) -> float:
        index = bisect.bisect_right(self.held, (at, float("inf")))
        return self.held[index - 1][1] if index else 0.0


class ForeignUse(Struct, frozen=True, kw_only=True):
    """Memory of a device that a process without a lease certainly held."""

    device: str
    mb: float
    start: float
    end: float


def readings_before(readings: Sequence[MachineReading], at: float, window_s: float) -> Sequence[MachineReading]:
    first = bisect.bisect_left(readings, at - window_s, key=lambda each: each.at)
    return readings[first : bisect.bisect_right(readings, at, key=lambda each: each.at)]


def check_ram_floor(
    runs: Iterable[ProgramRun], readings: Sequence[MachineReading], floor_mb: float, window_s: float = WINDOW_S
) -> Iterator[str]:
    """Nothing starts while less RAM is available than has to stay free."""
    for run in runs:
        best = max((each.available_mb for each in readings_before(readings, run.start, window_s)), default=floor_mb)
        if best < floor_mb:
            yield f"{run.run} started at {run.start:.2f} with {best:.0f} MB of RAM available, below {floor_mb:.0f} MB"


def check_ram_promises(
    runs: Sequence[ProgramRun], readings: Sequence[MachineReading], floor_mb: float, total_mb: float
) -> Iterator[str]:
    """What is promised and not yet taken fits into what is available above the floor, and all promises into the RAM."""
    for run in runs:
        if not run.ram_mb:
            continue
        beside = [other for other in runs if other is not run and other.start <= run.start <= other.last]
        promised = run.ram_mb + sum(other.ram_mb for other in beside)
        if promised > total_mb - floor_mb + _ROUNDING_MB:
            yield f"{promised:.0f} MB of RAM were promised at the start of {run.run} at {run.start:.2f}"
        left = [
            each.available_mb - run.ram_mb - sum(max(0.0, other.ram_mb - other.held_mb(each.at)) for other in beside)
            for each in readings_before(readings, run.start, WINDOW_S)
        ]
        if left and max(left) < floor_mb - _TOLERANCE_MB:
            who = ", ".join(f"{other.run} ({other.held_mb(run.start):.0f} of {other.ram_mb:.0f})" for other in beside)
            yield (
                f"{run.run} ({run.ram_mb:.0f} MB) started at {run.start:.2f} with {max(left):.0f} MB left once all "
                f"have taken their RAM, below {floor_mb:.0f} MB; beside {who}"
            )


def check_disks(runs: Iterable[ProgramRun], readings: Sequence[MachineReading]) -> Iterator[str]:
    for run in runs:
        before = readings_before(readings, run.start, WINDOW_S)
        for disk, least in run.disks.items():
            best = max((each.free_disk_mb[disk] for each in before), default=least)
            if best < least:
                yield f"{run.run} started at {run.start:.2f} with {best:.1f} MB free on {disk}, below {least:.0f} MB"


def check_cpu_load(runs: Iterable[ProgramRun], readings: Sequence[MachineReading], cpus: float) -> Iterator[str]:
    """No job starts after a long time of full load."""
    for run in runs:
        loads = cpu_loads(readings_before(readings, run.start, CPU_WINDOW_S), cpus)
        if run.is_job and len(loads) >= CPU_WINDOW_S / _CPU_STEP_S - 2 and min(loads) >= CPU_FULL_PERCENT:
            yield f"{run.run} started at {run.start:.2f} after {len(loads)} s of at least {min(loads):.0f}% CPU load"


def cpu_loads(readings: Sequence[MachineReading], cpus: float) -> list[float]:
    """Return the load in percent of each second, but for a last part of one."""
    loads: list[float] = []
    first = readings[0] if readings else None
    for each in readings:
        if first is not None and each.at - first.at >= _CPU_STEP_S:
            loads.append(100.0 * (each.cpu_used_s - first.cpu_used_s) / (each.at - first.at) / cpus)
            first = each
    return loads


def check_cpus(runs: Sequence[ProgramRun], cpus: float) -> Iterator[str]:
    """No more CPUs are declared by programs that run than there are."""
    for run in runs:
        beside = [other for other in runs if other is not run and other.start <= run.start <= other.last]
        if run.cpus and run.cpus + sum(other.cpus for other in beside) > cpus + 1e-6:
            who = [other.run for other in beside if other.cpus]
            yield f"{run.run} started at {run.start:.2f} with {run.cpus:g} CPUs beside {who}"


def check_device_memory(
    runs: Sequence[ProgramRun], foreign: Sequence[ForeignUse], capacity_mb: Mapping[str, float]
) -> Iterator[str]:
    """What processes without a lease hold, what others were promised and what this program needs fits on its device."""
    for run in runs:
        for device in run.devices if run.vram_mb else ():
            beside = [each for each in runs if each is not run and device in each.devices]
            promised = sum(each.vram_mb for each in beside if each.start <= run.start <= each.last)
            taken = least_foreign_mb([use for use in foreign if use.device == device], run.start)
            if taken + promised + run.vram_mb > capacity_mb[device] + _ROUNDING_MB:
                yield (
                    f"{run.run} ({run.vram_mb:.0f} MB) started at {run.start:.2f} on GPU {device}, where others were "
                    f"promised {promised:.0f} MB and {taken:.0f} MB were in use without a lease"
                )


def least_foreign_mb(uses: Sequence[ForeignUse], at: float, window_s: float = WINDOW_S) -> float:
    """Return the least that was in use at any moment of the window before."""
    moments = [at - window_s, at, *(use.end + 1e-6 for use in uses if at - window_s < use.end < at)]
    return min(sum(use.mb for use in uses if use.start <= moment <= use.end) for moment in moments)
