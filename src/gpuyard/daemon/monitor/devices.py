"""The devices of the machine with their leases and the memory of each, and their usage in the last day.

The list is computed once per sample for all clients. The ledger and the processes are read in a thread: the ledger may
be locked for a while, and processes may be many.

The history has spans of 10 minutes, an hour and a day. Each has its own step and stores means over that step, so its
size is bounded however long the daemon runs. While the machine is not sampled nothing is stored, which leaves a gap.
The history survives a restart (`history_file`).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct

from gpuyard.control.step_result import Step
from gpuyard.core.lease import Drain, Lease
from gpuyard.core.memory.device_breakdown import MemoryParts, break_down
from gpuyard.core.scheduling.closed_devices import drain_of
from gpuyard.core.scheduling.device_health import HealthIssue
from gpuyard.core.scheduling.device_memory import PromisedShare
from gpuyard.core.scheduling.host_capacity import HostReserved, HostState, HostUse, HostView, sum_reserved
from gpuyard.core.scheduling.wait_reasons import describe_holder
from gpuyard.core.snapshot import Device, Snapshot
from gpuyard.daemon.api.codec import copy_fields, encode
from gpuyard.daemon.api.wall_time import wall_time
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.monitor.device_health import HealthMonitor
from gpuyard.daemon.monitor.history_file import HistoryFile, Point, StoredHistory, StoredSpan
from gpuyard.daemon.server.http_parser import Response
from gpuyard.errors import EnvironmentFault
from gpuyard.leases.clear_devices import clear_devices
from gpuyard.leases.drain_devices import drain_devices, undrain_devices
from gpuyard.leases.host_usage import HostMeter
from gpuyard.leases.measured_usage import Measured, measure
from gpuyard.schema import machine
from gpuyard.schema.requests import DeviceHistoryQuery, DrainRequest, UndrainRequest

# While a client watches, the machine is sampled every second.
_RECENT_S = 2.0
_log = logging.getLogger(__name__)
MAX_POINTS = 300
_SPANS_S = {"10m": 600, "1h": 3600, "24h": 86_400}
# Many samples a second may arrive while jobs come and go; about one a second is stored.
_EVERY_S = 0.9
_SAVE_EVERY_S = 60.0
_DEVICE_COLUMNS = machine.DeviceSeries.__struct_fields__[1:]
_HOST_COLUMNS = machine.HostSeries.__struct_fields__[1:]
_MAX_DEVICES = 256

T = TypeVar("T")
Values = tuple[float | None, ...]


class DeviceUsers(Struct, frozen=True, kw_only=True):
    """The leases on the devices of a snapshot and what they use. `jobs` are the jobs of this queue by lease id."""

    snapshot: Snapshot
    leases: tuple[Lease, ...]
    measured: Measured
    jobs: dict[str, int]
    drains: tuple[Drain, ...] = ()
    banned: tuple[str, ...] = ()
    host_reserved: HostReserved
    issues: Mapping[str, Sequence[HealthIssue]] = {}

    def breakdown(self, device: Device) -> MemoryParts:
        shares = [
            PromisedShare(
                share=share,
                holder=lease.holder,
                measured_mb=self.measured.get((lease.id, device.id)),
                lease_id=lease.id,
            )
            for lease in self.leases
            if (share := lease.on(device.id)) is not None
        ]
        return break_down(device, shares, self.jobs.keys())


class DeviceList:
    def __init__(self, scheduler: SchedulerLoop) -> None:
        self._scheduler = scheduler
        self._snapshot: Snapshot | None = None
        self._users: asyncio.Task[DeviceUsers] | None = None
        self._answer: tuple[DeviceUsers, machine.MachineState] | None = None
        self.health = HealthMonitor(scheduler)
        scheduler.listeners.append(self._after_step)

    async def users(self) -> DeviceUsers:
        """Return the users of the devices as of the latest sample."""
        if self._users is None or (self._users.done() and self._users.exception() is not None):
            self._snapshot = self._scheduler.sampling.latest.snapshot
            self._users = asyncio.ensure_future(self._read(self._snapshot))
        return await asyncio.shield(self._users)

    def _after_step(self, step: Step) -> None:
        if step.events or self._scheduler.sampling.latest.snapshot is not self._snapshot:
            self._users = None

    async def _read(self, snapshot: Snapshot) -> DeviceUsers:
        scheduler = self._scheduler
        attempts = [live.attempt for live in scheduler.controller.transitions.live.values()]
        jobs = {attempt.lease_id: attempt.job_id for attempt in attempts if attempt.lease_id is not None}
        contents = await asyncio.to_thread(scheduler.ledger.contents)
        measured = await asyncio.to_thread(measure, snapshot, contents.leases)
        used, me = await self._host_used(contents.leases), scheduler.controller.me
        host = HostView(limits=scheduler.controller.rules.host.limits, used=used, machine=me.machine)
        return DeviceUsers(
            snapshot=snapshot,
            leases=contents.leases,
            measured=measured,
            jobs=jobs,
            drains=contents.drains,
            issues=self.health.issues(snapshot, contents.health_marks),
            banned=scheduler.controller.rules.devices.banned_ids(snapshot),
            host_reserved=sum_reserved(HostState.of_leases(snapshot.host, host, contents.leases)),
        )

    async def _host_used(self, leases: tuple[Lease, ...]) -> Mapping[str, HostUse]:
        """Return what leases use that do not say so themselves."""
        return await asyncio.to_thread(HostMeter().use_of, leases)

    async def drain(self, body: DrainRequest) -> machine.DrainResult:
        drains = await self._change(partial(drain_devices, reason=body.reason), body.devices)
        return self._drained([drain.device_id for drain in drains])

    async def undrain(self, body: UndrainRequest) -> machine.DrainResult:
        return self._drained(await self._change(undrain_devices, body.devices))

    async def clear(self, body: UndrainRequest) -> machine.ClearResult:
        return machine.ClearResult(devices=await self._change(clear_devices, body.devices))

    async def _change(self, change: Callable[..., list[T]], names: list[str | int]) -> list[T]:
        """Change drains in a thread: another process may hold the ledger's mutex for a while."""
        scheduler = self._scheduler
        snapshot = (await scheduler.sampling.fresh(_RECENT_S)).snapshot
        changed = await asyncio.to_thread(change, scheduler.ledger, names, snapshot=snapshot)
        self._users = None
        scheduler.wake()
        return changed

    def _drained(self, ids: list[str]) -> machine.DrainResult:
        drains = self._scheduler.ledger.read_drains()
        return machine.DrainResult(devices=ids, drains=[machine.drain_row(drain) for drain in drains])

    async def devices(self) -> machine.MachineState:
        await self._scheduler.sampling.fresh(_RECENT_S)
        users = await self.users()
        if self._answer is None or self._answer[0] is not users:
            snapshot = users.snapshot
            state = machine.MachineState(
                taken_at=wall_time(self._scheduler, snapshot.taken_at),
                host=snapshot.host,
                host_reserved=users.host_reserved,
                problems=snapshot.problems,
                devices=[_as_device(users, device) for device in snapshot.devices],
                disks=disk_rows(self._scheduler),
            )
            self._answer = users, state
        return self._answer[1]


def disk_rows(scheduler: SchedulerLoop) -> list[machine.DiskRow]:
    least_mb = scheduler.controller.rules.min_free_disk_mb
    watched = scheduler.controller.disk_gate.watched()
    return [copy_fields(each.figure, machine.DiskRow, what=each.what, min_free_mb=least_mb) for each in watched]


def _as_device(users: DeviceUsers, device: Device) -> machine.DeviceRow:
    issues = users.issues.get(device.id, ())
    return copy_fields(
        device,
        machine.DeviceRow,
        label=users.snapshot.labels.get(device.id),
        numa_node=users.snapshot.topology.nodes.get(device.id),
        linked_to=[users.snapshot.labels.get(each, each) for each in users.snapshot.topology.linked_to(device.id)],
        is_usable=device in users.snapshot.usable_devices() and not any(each.is_fault for each in issues),
        banned=device.id in users.banned or device.parent in users.banned,
        drain=None if (drain := drain_of(device, users.drains)) is None else machine.drain_row(drain),
        issues=[machine.issue_row(issue) for issue in issues],
        memory=users.breakdown(device),
        leases=[_as_lease(users, lease, device) for lease in users.leases if lease.on(device.id) is not None],
    )


def _as_lease(users: DeviceUsers, lease: Lease, device: Device) -> machine.LeaseRow:
    share, job_id = lease.on(device.id), users.jobs.get(lease.id)
    return machine.LeaseRow(
        id=lease.id,
        who=f"job {job_id}" if job_id is not None else lease.holder.label or describe_holder(lease.holder),
        user=lease.holder.user,
        pid=lease.holder.pid,
        job=job_id,
        is_own=job_id is not None,
        is_exclusive=share is not None and share.is_exclusive,
        reserved_mb=share.memory_mb if share is not None else None,
        measured_mb=users.measured.get((lease.id, device.id)),
        since=lease.since,
    )


# The history


class UsageSeries:
    """Means of each column per step; the last step may be incomplete."""

    def __init__(self, columns: tuple[str, ...], step_s: float) -> None:
        self._columns = columns
        self._step_s = step_s
        self._complete: deque[tuple[float, Values]] = deque(maxlen=MAX_POINTS)
        self._step_start: float | None = None
        self._sums: list[tuple[float, int]] = []

    def add(self, at: float, row: Values) -> None:
        start = at // self._step_s * self._step_s
        if start != self._step_start:
            if self._step_start is not None:
                self._complete.append((self._step_start, self._means()))
            self._step_start, self._sums = start, [(0.0, 0)] * len(self._columns)
        self._sums = [
            (total, count) if value is None else (total + value, count + 1)
            for (total, count), value in zip(self._sums, row, strict=True)
        ]

    def since(self, at: float, to_wall: Callable[[float], float] = float) -> dict[str, Any]:
        last = [] if self._step_start is None else [(self._step_start, self._means())]
        points = [point for point in (*self._complete, *last) if point[0] > at][-MAX_POINTS:]
        columns: dict[str, list[float | None]] = {
            name: [row[place] for _, row in points] for place, name in enumerate(self._columns)
        }
        return {"at": [to_wall(start) for start, _ in points], **columns}

    def points(self) -> list[Point]:
        """Return all points, to be stored; the last one may be incomplete."""
        return [*self._complete, *([] if self._step_start is None else [(self._step_start, self._means())])]

    def restore(self, points: Sequence[Point], since: float, until: float) -> None:
        """Begin with these points, without those outside of the time, and those with other columns."""
        good = (each for each in points if since < each[0] <= until and len(each[1]) == len(self._columns))
        self._complete.extend(good)

    def _means(self) -> Values:
        return tuple(round(total / count, 1) if count else None for total, count in self._sums)


class HistorySpan:
    """The series of all devices and of the host over one span. A device that has gone keeps its past."""

    def __init__(self, span_s: int) -> None:
        self.span_s = span_s
        self.step_s = span_s / MAX_POINTS
        self._devices: dict[str, UsageSeries] = {}
        self._host = UsageSeries(_HOST_COLUMNS, self.step_s)

    def add(self, at: float, devices: Mapping[str, Values], host: Values) -> None:
        self._host.add(at, host)
        for device_id, row in devices.items():
            if device_id not in self._devices and len(self._devices) < _MAX_DEVICES:
                self._devices[device_id] = UsageSeries(_DEVICE_COLUMNS, self.step_s)
            if device_id in self._devices:
                self._devices[device_id].add(at, row)

    def stored(self) -> StoredSpan:
        devices = {device_id: series.points() for device_id, series in self._devices.items()}
        return StoredSpan(host=self._host.points(), devices=devices)

    def restore(self, stored: StoredSpan, now: float) -> None:
        """Begin with what was stored, without what is older than the span, and without devices not seen since."""
        since = now - self.span_s
        self._host.restore(stored.host, since, now)
        for device_id, points in list(stored.devices.items())[:_MAX_DEVICES]:
            series = UsageSeries(_DEVICE_COLUMNS, self.step_s)
            series.restore(points, since, now)
            if series.points():
                self._devices[device_id] = series

    def as_answer(self, now: float, to_wall: Callable[[float], float] = float) -> machine.DeviceHistory:
        since = now - self.span_s
        return machine.DeviceHistory(
            span_s=self.span_s,
            step_s=self.step_s,
            devices={
                device_id: machine.DeviceSeries(**series.since(since, to_wall))
                for device_id, series in self._devices.items()
            },
            host=machine.HostSeries(**self._host.since(since, to_wall)),
        )


class UsageHistory:
    def __init__(self, scheduler: SchedulerLoop, devices: DeviceList, file: HistoryFile) -> None:
        self._scheduler = scheduler
        self._devices = devices
        self._spans = {name: HistorySpan(seconds) for name, seconds in _SPANS_S.items()}
        self._bodies: dict[str, bytes] = {}
        self._added_at = float("-inf")
        self._adding: asyncio.Task[None] | None = None
        self._file = file
        self._saving: asyncio.Task[None] | None = None
        self._saved_at = self._added_at
        self._restore()
        scheduler.listeners.append(self._after_step)

    def close(self) -> None:
        """Store what was added since the file was last written."""
        if self._saved_at < self._added_at:
            self._file.write(self._stored())

    def _restore(self) -> None:
        stored, now = self._file.read(), self._scheduler.clock.now()
        for name, span in (stored.spans if stored is not None else {}).items():
            if name in self._spans:
                self._spans[name].restore(span, now)

    def _stored(self) -> StoredHistory:
        return StoredHistory(spans={name: span.stored() for name, span in self._spans.items()})

    def _save_if_due(self, at: float) -> None:
        """Write the file in a thread, once a minute."""
        if at >= self._saved_at + _SAVE_EVERY_S and (self._saving is None or self._saving.done()):
            self._saved_at = at
            self._saving = asyncio.ensure_future(asyncio.to_thread(self._file.write, self._stored()))

    def history(self, query: DeviceHistoryQuery) -> Response:
        name = query.span
        if name not in self._bodies:
            clock = self._scheduler.clock
            self._bodies[name] = encode(self._spans[name].as_answer(clock.now(), clock.to_wall))
        return Response(body=self._bodies[name])

    def _after_step(self, _: Step) -> None:
        at = self._scheduler.sampling.latest.snapshot.taken_at
        if at is None or self._adding is not None:
            return
        if at >= self._added_at + _EVERY_S:
            self._added_at = at
            self._adding = asyncio.ensure_future(self._add())
            self._adding.add_done_callback(self._on_added)

    def _on_added(self, task: "asyncio.Task[None]") -> None:
        self._adding = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a sample could not be added to the history", exc_info=error)

    async def _add(self) -> None:
        try:
            users = await self._devices.users()
        except EnvironmentFault as error:
            _log.warning("%s; this sample is missing in the history", error)
            return
        at = users.snapshot.taken_at
        if at is None:
            return
        devices = {device.id: _device_row(users, device) for device in users.snapshot.devices}
        host = users.snapshot.host
        total, available = host.memory_total_mb, host.memory_available_mb
        used = None if total is None or available is None else total - available
        for span in self._spans.values():
            span.add(at, devices, (host.cpu_percent, used))
        self._bodies.clear()
        self._save_if_due(at)


def _device_row(users: DeviceUsers, device: Device) -> Values:
    parts = users.breakdown(device)
    memory = parts.own_used_mb, parts.others_used_mb, parts.foreign_mb, device.memory_used_mb
    return (*memory, device.utilization_percent, device.power_draw_w)
