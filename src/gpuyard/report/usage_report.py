"""A usage report of a time window: totals for each group of jobs, and for all jobs as the sum of the groups.

- An attempt counts, with its energy, by the part of its run time in the window, without the time in which it was
suspended; one that still runs up to the end of the window.
- GPU-hours are the run time of an attempt on each of its devices, so attempts that share a device all count. How long a
device was in use is a separate figure, and counts each moment once.
- Unused memory is reserved memory minus the peak, over time; an attempt with a device of its own reserved all of it. An
attempt without a measurement counts as unknown, on neither side of the ratio."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from statistics import median
from typing import Self

from msgspec import Struct
from msgspec.structs import asdict

from gpuyard.model.energy import (
    NO_PRICE,
    EnergyPrice,
    EnergyTotals,
    EnergyUse,
    add_energy,
    energy_totals,
    part_of_energy,
)
from gpuyard.model.job import OutcomeKind
from gpuyard.model.machine_snapshot import Device
from gpuyard.report.chart_rows import (
    HOUR_S,
    HourlyPicture,
    Hours,
    LocalTime,
    TimeWindow,
    hourly_picture,
    merge_intervals,
)
from gpuyard.report.failure_causes import CauseTexts

# Also of different errors, by which attempts are counted; further ones only by their exit status.
MAX_GROUPS = 100
# Outcome, exit status, where memory was short, and the key of the error.
_CauseKey = tuple[str, int | None, str | None, str | None]


class PastAttempt(Struct, frozen=True, kw_only=True, gc=False):
    """An attempt as a report reads it. Without `started_at` it never started: it has no run time and is not counted as
    running. `queued_at` is when its job was queued, if this was its first start. For an attempt on another machine only
    the number of `gpus` is known, not the `devices`. `suspended` are intervals, in order."""

    job: int
    group: str
    started_at: float | None
    ended_at: float | None = None
    queued_at: float | None = None
    devices: tuple[str, ...] = ()
    gpus: int = 0
    reserved_mb: float | None = None
    is_alone: bool = False
    peaks_mb: Mapping[str, float] = {}
    outcome: str | None = None
    status: int | None = None
    lacked: str | None = None
    is_healed: bool = False
    suspended: tuple[tuple[float, float | None], ...] = ()
    energy: EnergyUse | None = None
    error_line: str | None = None


class GroupBy(StrEnum):
    """What jobs are grouped by. WORKSPACE: the workspace of a task, the tag of any other job. An array has one name."""

    USER = "user"
    WORKSPACE = "workspace"
    NAME = "name"


class WaitTotals(Struct, frozen=True, kw_only=True):
    """Time from being queued to the first start, of jobs that started in the window."""

    jobs: int
    median_s: float | None
    p90_s: float | None
    longest_s: float | None


class MemoryTotals(Struct, frozen=True, kw_only=True):
    """Memory that measured attempts reserved, and how much of it they never used; GPU-hours without a measurement."""

    reserved_gb_hours: float
    unused_gb_hours: float
    unused_percent: float | None
    unknown_gpu_hours: float


class Cause(Struct, frozen=True, kw_only=True):
    """An outcome other than success. `healed` attempts are of jobs that succeeded later."""

    outcome: str
    status: int | None
    where: str | None
    attempts: int
    healed: int
    error_line: str | None = None


class ReportTotals(Struct, frozen=True, kw_only=True):
    gpu_hours: float
    suspended_hours: float
    jobs: int
    attempts: int
    succeeded: int
    running: int
    waits: WaitTotals
    memory: MemoryTotals
    energy: EnergyTotals
    causes: tuple[Cause, ...]


class ReportGroup(ReportTotals, frozen=True, kw_only=True):
    """Totals of one user, workspace or name. `group` is None for the row that sums up the remaining `groups`."""

    group: str | None
    groups: int


class DeviceUse(Struct, frozen=True, kw_only=True):
    id: str
    index: int | None
    label: str | None = None
    name: str | None
    is_there: bool
    attempts: int
    gpu_hours: float
    busy_hours: float
    busy_percent: float | None


class DeviceTimeUse(Struct, frozen=True, kw_only=True):
    """How much of the time of the present devices was used."""

    devices: int
    device_hours: float
    busy_hours: float
    busy_percent: float | None


class UsageReport(Struct, frozen=True, kw_only=True):
    total: ReportTotals
    groups: tuple[ReportGroup, ...]
    devices: tuple[DeviceUse, ...]
    box: DeviceTimeUse
    picture: HourlyPicture


def run_intervals(ran: PastAttempt, window: TimeWindow) -> list[tuple[float, float]]:
    """Return the intervals inside the window in which the attempt ran."""
    if ran.started_at is None:
        return []
    start, end = _bounds(ran.started_at, ran.ended_at, window)
    if end <= start:
        return []
    found: list[tuple[float, float]] = []
    for paused_at, resumed_at in ran.suspended:
        if paused_at > start:
            found.append((start, min(paused_at, end)))
        # A clock that was set back meanwhile must not make any time count twice.
        start = max(start, paused_at, end if resumed_at is None else resumed_at)
        if start >= end:
            return found
    return [*found, (start, end)]


def _bounds(started_at: float, ended_at: float | None, window: TimeWindow) -> tuple[float, float]:
    return max(started_at, window.since), window.until if ended_at is None else min(ended_at, window.until)


class TotalsBuilder:
    def __init__(self, errors: CauseTexts) -> None:
        """`errors` is shared by all groups of a report."""
        self.errors = errors
        self.gpu_s = self.suspended_s = self.unknown_s = self.reserved_mb_s = self.unused_mb_s = 0.0
        self.attempts = self.succeeded = self.running = 0
        self.jobs: set[int] = set()
        self.waits: list[float] = []
        self.energy = EnergyUse()
        self.causes: Counter[_CauseKey] = Counter()
        self.healed: Counter[_CauseKey] = Counter()

    def note_end(self, ran: PastAttempt) -> None:
        self.attempts += 1
        self.jobs.add(ran.job)
        if ran.outcome is None:
            self.running += ran.started_at is not None
        elif ran.outcome == OutcomeKind.SUCCEEDED:
            self.succeeded += 1
        else:
            # The exit status of a stopped program only says which signal ended it.
            status = ran.status if ran.outcome == OutcomeKind.FAILED else None
            cause = (ran.outcome, status, ran.lacked, self.errors.key(ran.error_line))
            self.causes[cause] += 1
            self.healed[cause] += ran.is_healed

    def sum_of(self, others: Iterable["TotalsBuilder"]) -> Self:
        """Return this one with the totals of others."""
        sums = ("gpu_s", "suspended_s", "unknown_s", "reserved_mb_s", "unused_mb_s", "attempts", "succeeded", "running")
        for other in others:
            for name in sums:
                setattr(self, name, getattr(self, name) + getattr(other, name))
            self.jobs |= other.jobs
            self.energy = add_energy(self.energy, other.energy)
            self.waits += other.waits
            self.causes.update(other.causes)
            self.healed.update(other.healed)
        return self

    def totals(self, price: EnergyPrice) -> ReportTotals:
        ordered = sorted(self.waits)
        longest_s, p90_s = (ordered[-1], ordered[math.ceil(0.9 * len(ordered)) - 1]) if ordered else (None, None)
        waits = WaitTotals(
            jobs=len(ordered), median_s=median(ordered) if ordered else None, p90_s=p90_s, longest_s=longest_s
        )
        memory = MemoryTotals(
            reserved_gb_hours=self.reserved_mb_s / 1024.0 / HOUR_S,
            unused_gb_hours=self.unused_mb_s / 1024.0 / HOUR_S,
            unused_percent=100 * self.unused_mb_s / self.reserved_mb_s if self.reserved_mb_s else None,
            unknown_gpu_hours=self.unknown_s / HOUR_S,
        )
        counted = sorted(
            self.causes.items(),
            key=lambda each: (-each[1], each[0][0], each[0][1] or 0, each[0][2] or "", each[0][3] or ""),
        )
        causes = (
            Cause(
                outcome=key[0], status=key[1], where=key[2], attempts=attempts, healed=self.healed[key],
                error_line=self.errors.text(key[3]),
            )
            for key, attempts in counted
        )  # fmt: skip
        return ReportTotals(
            gpu_hours=self.gpu_s / HOUR_S, suspended_hours=self.suspended_s / HOUR_S, jobs=len(self.jobs),
            attempts=self.attempts, succeeded=self.succeeded, running=self.running, waits=waits, memory=memory,
            energy=energy_totals(self.energy, self.gpu_s, price),
            causes=tuple(causes),
        )  # fmt: skip


class Reporter:
    """Builds a report from attempts, which are added one by one in any order."""

    def __init__(
        self, window: TimeWindow, devices: Sequence[Device], local: LocalTime, price: EnergyPrice = NO_PRICE
    ) -> None:
        self._window, self._price, self._local = window, price, local
        self._devices = {device.id: device for device in devices}
        self._errors = CauseTexts(MAX_GROUPS)
        self._groups: defaultdict[str, TotalsBuilder] = defaultdict(lambda: TotalsBuilder(self._errors))
        self._hours = Hours(window, local)
        self._intervals: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        self._attempts_on: Counter[str] = Counter()

    def add(self, ran: PastAttempt) -> None:
        group = self._groups[ran.group]
        group.note_end(ran)
        if ran.queued_at is not None and ran.started_at is not None and ran.started_at >= self._window.since:
            group.waits.append(max(0.0, ran.started_at - ran.queued_at))
        found = run_intervals(ran, self._window)
        for start, end in found:
            self._hours.add(start, end, ran.gpus)
        ran_s = sum(end - start for start, end in found)
        if ran.suspended and ran.started_at is not None:
            start, end = _bounds(ran.started_at, ran.ended_at, self._window)
            group.suspended_s += max(0.0, end - start - ran_s)
        group.gpu_s += ran_s * ran.gpus
        if ran.energy is not None and ran_s > 0:
            whole = run_intervals(ran, TimeWindow(-math.inf, self._window.until))
            part = ran_s / sum(end - start for start, end in whole)
            group.energy = add_energy(group.energy, part_of_energy(ran.energy, part))
        group.unknown_s += ran_s * (ran.gpus - len(ran.devices))
        for device_id in ran.devices:
            self._intervals[device_id].extend(found)
            self._attempts_on[device_id] += 1
            device, peak = self._devices.get(device_id), ran.peaks_mb.get(device_id)
            reserved = ran.reserved_mb if not ran.is_alone else device.memory_total_mb if device is not None else None
            if reserved is None or peak is None:
                group.unknown_s += ran_s
            else:
                group.reserved_mb_s += reserved * ran_s
                group.unused_mb_s += max(0.0, reserved - peak) * ran_s

    def report(self) -> UsageReport:
        busy = {device_id: merge_intervals(found) for device_id, found in self._intervals.items()}
        hours = Hours(self._window, self._local)
        for device_id in busy.keys() & self._devices.keys():
            for start, end in busy[device_id]:
                hours.add(start, end)
        total = TotalsBuilder(self._errors).sum_of(self._groups.values())
        device_hours, busy_hours = len(self._devices) * self._window.hours, sum(hours.seconds()) / HOUR_S
        return UsageReport(
            total=total.totals(self._price),
            groups=tuple(self._largest_groups()),
            devices=tuple(
                sorted(self._device_uses(busy), key=lambda use: (-use.busy_hours, use.index is None, use.index))
            ),
            box=DeviceTimeUse(
                devices=len(self._devices),
                device_hours=device_hours,
                busy_hours=busy_hours,
                busy_percent=min(100.0, 100 * busy_hours / device_hours) if device_hours else None,
            ),
            picture=hourly_picture(self._window, self._local, self._hours, hours, len(self._devices)),
        )

    def _largest_groups(self) -> Iterator[ReportGroup]:
        """Yield the groups that used most, in that order, and the rest as one group."""
        ordered = sorted(self._groups.items(), key=lambda item: (-item[1].gpu_s, -item[1].attempts, item[0]))
        for name, builder in ordered[:MAX_GROUPS]:
            yield ReportGroup(group=name, groups=1, **asdict(builder.totals(self._price)))
        if others := ordered[MAX_GROUPS:]:
            rest = TotalsBuilder(self._errors).sum_of(builder for _, builder in others)
            yield ReportGroup(group=None, groups=len(others), **asdict(rest.totals(self._price)))

    def _device_uses(self, busy: Mapping[str, list[tuple[float, float]]]) -> Iterator[DeviceUse]:
        for device_id in self._devices.keys() | busy.keys():
            device = self._devices.get(device_id)
            hours = _hours(busy.get(device_id, ()))
            yield DeviceUse(
                id=device_id, index=None if device is None else device.index,
                name=None if device is None else device.name, is_there=device is not None,
                attempts=self._attempts_on[device_id], gpu_hours=_hours(self._intervals.get(device_id, ())),
                busy_hours=hours,
                busy_percent=min(100.0, 100 * hours / self._window.hours) if device is not None else None,
            )  # fmt: skip


def _hours(found: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in found) / HOUR_S
