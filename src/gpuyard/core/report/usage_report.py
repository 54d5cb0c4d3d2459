"""A report on a stretch of time: what the attempts in it came to, for each group of jobs and in all.

Rules:
- An attempt counts with the part of it that lies in the window, without the time in which it was suspended. One that
  goes on counts up to the window's end.
- GPU-hours are an attempt's time on each of its devices, so those that share a device count each. How long a device was
  in use is told apart from that, and counts once.
- Waste is memory that was reserved and not used at the peak, over time; who had a device alone had reserved all of it.
  Where nobody measured it is unknown, and stays out of both sides of the sum.
- The whole is the sum of its groups.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from gpuyard.core.report.hourly import HOUR_S, HourlyPicture, Hours, Local, TimeWindow, draw, merged
from gpuyard.core.report.totals import ReportTotals, TotalsBuilder
from gpuyard.core.snapshot import Device

MOST_GROUPS = 100


class PastAttempt(Struct, frozen=True, kw_only=True, gc=False):
    """An attempt as a report reads it. `queued_at` is since when its job waited, where this was its first start; at an
    engine its `devices` have no names here, and only their number is known. `suspended` are stretches, in order."""

    job: int
    group: str
    started_at: float
    ended_at: float | None = None
    queued_at: float | None = None
    has_started: bool = True
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


class Group(Struct, frozen=True, kw_only=True):
    """Without a name it is the rest, so many groups together."""

    group: str | None
    groups: int
    figures: ReportTotals


class DeviceUse(Struct, frozen=True, kw_only=True):
    id: str
    index: int | None
    name: str | None
    is_there: bool
    attempts: int
    gpu_hours: float
    busy_hours: float
    busy_percent: float | None


class DeviceTimeUse(Struct, frozen=True, kw_only=True):
    """How much of the time of the devices that are there now was used."""

    devices: int
    device_hours: float
    busy_hours: float
    busy_percent: float | None


class UsageReport(Struct, frozen=True, kw_only=True):
    total: ReportTotals
    groups: tuple[Group, ...]
    devices: tuple[DeviceUse, ...]
    box: DeviceTimeUse
    picture: HourlyPicture


def stretches(ran: PastAttempt, window: TimeWindow) -> list[tuple[float, float]]:
    """When it ran within the window."""
    begin, end = _bounds(ran, window)
    if end <= begin:
        return []
    found: list[tuple[float, float]] = []
    for paused_at, resumed_at in ran.suspended:
        if paused_at > begin:
            found.append((begin, min(paused_at, end)))
        # A clock that was set back meanwhile must not have anything count twice.
        begin = max(begin, paused_at, end if resumed_at is None else resumed_at)
        if begin >= end:
            return found
    return [*found, (begin, end)]


def _bounds(ran: PastAttempt, window: TimeWindow) -> tuple[float, float]:
    ended_at = window.until if ran.ended_at is None else min(ran.ended_at, window.until)
    begin = max(ran.started_at, window.since)
    return begin, ended_at if ran.has_started else begin


class Reporter:
    """Attempts go in one by one, in any order; the report comes out."""

    def __init__(self, window: TimeWindow, devices: Sequence[Device], local: Local) -> None:
        self._window = window
        self._local = local
        self._devices = {device.id: device for device in devices}
        self._tallies: dict[str, TotalsBuilder] = {}
        self._hours = Hours(window, local)
        self._on: dict[str, list[tuple[float, float]]] = {}
        self._attempts_on: dict[str, int] = {}

    def add(self, ran: PastAttempt) -> None:
        tally = self._tallies.get(ran.group)
        if tally is None:
            tally = self._tallies[ran.group] = TotalsBuilder()
        tally.attempts += 1
        tally.jobs.add(ran.job)
        tally.note_end(ran.outcome, ran.status, ran.lacked, is_healed=ran.is_healed, has_started=ran.has_started)
        if ran.queued_at is not None and ran.has_started and ran.started_at >= self._window.since:
            tally.waits.append(max(0.0, ran.started_at - ran.queued_at))
        self._add_time(ran, tally)

    def _add_time(self, ran: PastAttempt, tally: TotalsBuilder) -> None:
        found = stretches(ran, self._window)
        ran_s = 0.0
        for begin, end in found:
            ran_s += end - begin
            self._hours.add(begin, end, ran.gpus)
        if ran.suspended:
            begin, end = _bounds(ran, self._window)
            tally.suspended_s += max(0.0, end - begin - ran_s)
        tally.gpu_s += ran_s * ran.gpus
        for device_id in ran.devices:
            self._on.setdefault(device_id, []).extend(found)
            self._attempts_on[device_id] = self._attempts_on.get(device_id, 0) + 1
        if ran.gpus:
            self._add_memory(ran, ran_s, tally)

    def _add_memory(self, ran: PastAttempt, ran_s: float, tally: TotalsBuilder) -> None:
        tally.unknown_s += ran_s * (ran.gpus - len(ran.devices))
        for device_id in ran.devices:
            reserved, peak = self._reserved(ran, device_id), ran.peaks_mb.get(device_id)
            if reserved is None or peak is None:
                tally.unknown_s += ran_s
            else:
                tally.reserved_mb_s += reserved * ran_s
                tally.unused_mb_s += max(0.0, reserved - peak) * ran_s

    def _reserved(self, ran: PastAttempt, device_id: str) -> float | None:
        if not ran.is_alone:
            return ran.reserved_mb
        device = self._devices.get(device_id)
        return None if device is None else device.memory_total_mb

    def report(self) -> UsageReport:
        busy = {device_id: merged(found) for device_id, found in self._on.items()}
        hours = Hours(self._window, self._local)
        for device_id in busy.keys() & self._devices.keys():
            for begin, end in busy[device_id]:
                hours.add(begin, end)
        total = TotalsBuilder()
        for tally in self._tallies.values():
            total.take(tally)
        return UsageReport(
            total=total.figures(),
            groups=tuple(_groups(self._tallies)),
            devices=tuple(sorted(self._uses(busy), key=lambda use: (-use.busy_hours, use.index is None, use.index))),
            box=_box(len(self._devices), self._window.hours, sum(hours.seconds()) / HOUR_S),
            picture=draw(self._window, self._local, self._hours, hours, len(self._devices)),
        )

    def _uses(self, busy: Mapping[str, list[tuple[float, float]]]) -> Iterator[DeviceUse]:
        for device_id in self._devices.keys() | busy.keys():
            device = self._devices.get(device_id)
            hours = _hours(busy.get(device_id, ()))
            yield DeviceUse(
                id=device_id,
                index=None if device is None else device.index,
                name=None if device is None else device.name,
                is_there=device is not None,
                attempts=self._attempts_on.get(device_id, 0),
                gpu_hours=_hours(self._on.get(device_id, ())),
                busy_hours=hours,
                busy_percent=min(100.0, 100 * hours / self._window.hours) if device is not None else None,
            )


def _hours(found: Iterable[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in found) / HOUR_S


def _box(devices: int, hours: float, busy_hours: float) -> DeviceTimeUse:
    there = devices * hours
    percent = min(100.0, 100 * busy_hours / there) if there else None
    return DeviceTimeUse(devices=devices, device_hours=there, busy_hours=busy_hours, busy_percent=percent)


def _groups(tallies: Mapping[str, TotalsBuilder]) -> Iterator[Group]:
    """Those that used most first; beyond a number that anybody would read, the rest as one."""
    ordered = sorted(tallies.items(), key=lambda item: (-item[1].gpu_s, -item[1].attempts, item[0]))
    for name, tally in ordered[:MOST_GROUPS]:
        yield Group(group=name, groups=1, figures=tally.figures())
    if others := ordered[MOST_GROUPS:]:
        rest = TotalsBuilder()
        for _, tally in others:
            rest.take(tally)
        yield Group(group=None, groups=len(others), figures=rest.figures())
