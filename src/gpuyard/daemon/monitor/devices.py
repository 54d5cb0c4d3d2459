"""The devices of the machine with their leases, the memory of each, and their health.

The list is computed once per sample for all clients. The step that sees a faulty reading has closed the device already:
the mark in the ledger is for scripts of the same user and for the next daemon, and says since when. A mark of a figure
is removed when the figure is normal again; that of an Xid stays until a user clears the device. A link that was wider
while this daemon ran has lost lanes: a fault."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.daemon.api.codec import copy_fields, wall_time
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.ledger.drains_and_marks import add_mark, remove_marks
from gpuyard.ledger.ledger import clear_devices, drain_devices, undrain_devices
from gpuyard.ledger.measured_usage import HostMeter, Measured, measure
from gpuyard.model.lease import Drain, Lease
from gpuyard.model.machine_snapshot import Device, HealthMark, IssueKind, Snapshot
from gpuyard.policy.device_health import HealthIssue, describe_issue, device_issues, drain_of
from gpuyard.policy.device_state import MemoryParts, PromisedShare, break_down
from gpuyard.policy.host_room import HostReserved, HostState, HostView, sum_reserved
from gpuyard.policy.wait_reasons import describe_holder
from gpuyard.queue.step import Step
from gpuyard.schema import machine
from gpuyard.schema.requests import DrainRequest, UndrainRequest

_log = logging.getLogger(__name__)
T = TypeVar("T")


def device_title(device: Device, snapshot: Snapshot) -> str:
    label = snapshot.labels.get(device.id)
    number = device.id if label is None else f"GPU {label}"
    return f"{number} ({device.name})" if device.name else number


class HealthMonitor:
    def __init__(self, scheduler: SchedulerLoop) -> None:
        self._scheduler = scheduler
        self._snapshot: Snapshot | None = None
        self._marks: tuple[HealthMark, ...] | None = None  # None: not read yet
        self._widest: dict[str, int] = {}
        self._since: dict[tuple[str, IssueKind, int | None], float] = {}
        # Called with a title of the device, and what is wrong with it.
        self.on_fault: list[Callable[[str, HealthIssue], None]] = []
        scheduler.listeners.append(self._after_step)
        scheduler.notice_sources.append(self._notices)

    def issues(self, snapshot: Snapshot, marks: Sequence[HealthMark]) -> dict[str, tuple[HealthIssue, ...]]:
        """Return what is wrong with each device, and since when as far as this daemon or the ledger knows."""
        return {
            device_id: tuple(
                issue if issue.since is not None else replace(issue, since=self._since.get(_key(device_id, issue)))
                for issue in issues
            )
            for device_id, issues in device_issues(snapshot, marks).items()
        }

    def _after_step(self, _: Step) -> None:
        snapshot, ledger = self._scheduler.sampling.latest.snapshot, self._scheduler.ledger
        if snapshot is self._snapshot or not any(device.health is not None for device in snapshot.devices):
            return
        self._snapshot = snapshot
        if self._marks is None or self._marks or self._since:  # else no mark matters
            self._marks = ledger.read_health_marks()
        cards = [device for device in snapshot.devices if device.parent is None and device.health is not None]
        has_new, has_fewer = self._add_marks(cards, snapshot), self._remove_marks(cards, snapshot)
        if has_new or has_fewer:
            self._marks = ledger.read_health_marks()
            self._scheduler.wake()

    def _add_marks(self, cards: Sequence[Device], snapshot: Snapshot) -> bool:
        """Record the faults that are not in the ledger yet. Return whether there are any."""
        marks, now, is_any = self._marks or (), time.time(), False
        narrow = {mark.device_id for mark in marks if mark.kind is IssueKind.LINK}
        lost = []
        for card in cards:
            width = None if card.health is None else card.health.link_width
            if width is not None:
                widest = self._widest[card.id] = max(width, self._widest.get(card.id, 0))
                if width < widest and card.id not in narrow:
                    lost.append(HealthMark(device_id=card.id, since=now, kind=IssueKind.LINK))
        found = device_issues(snapshot, (*marks, *lost))
        keys = {_key(card.id, issue) for card in cards for issue in found.get(card.id, ())}
        self._since = {key: self._since.get(key, now) for key in keys}
        known = {(mark.device_id, mark.kind, mark.xid) for mark in marks}
        for card in cards:
            for issue in found.get(card.id, ()):
                if issue.is_fault and _key(card.id, issue) not in known:
                    self._record(card, issue, snapshot, issue.since or now)
                    is_any = True
        return is_any

    def _record(self, card: Device, issue: HealthIssue, snapshot: Snapshot, since: float) -> None:
        mark = HealthMark(device_id=card.id, since=since, kind=issue.kind, xid=issue.xid)
        title = device_title(card, snapshot)
        _log.warning("%s is %s; %s", title, describe_issue(issue), issue.remedy)
        try:
            add_mark(self._scheduler.ledger.folder, mark)
        except OSError as error:
            _log.warning("the fault of %s cannot be recorded in the lease directory: %s", title, error.strerror)
        for report in self.on_fault:
            report(title, issue)

    def _remove_marks(self, cards: Sequence[Device], snapshot: Snapshot) -> bool:
        """Remove this user's marks of figures that are normal again. Return whether there are any."""
        marks, ids = self._marks or (), {card.id for card in cards}
        kinds = {(id_, issue.kind) for id_, found in device_issues(snapshot, marks).items() for issue in found}
        figures = [each for each in marks if each.device_id in ids and each.kind not in (None, IssueKind.XID)]
        over = {each for each in figures if (each.device_id, each.kind) not in kinds}
        if over:
            try:
                remove_marks(self._scheduler.ledger.folder, lambda mark: mark in over)
            except OSError as error:
                _log.warning("the lease directory cannot be changed: %s", error.strerror)
        return bool(over)

    def _notices(self) -> Iterator[str]:
        snapshot = self._scheduler.sampling.latest.snapshot
        for device_id, issues in self.issues(snapshot, self._marks or ()).items():
            label = snapshot.labels.get(device_id, device_id)
            yield from (f"GPU {label} is {describe_issue(each)}; {each.remedy}" for each in issues if each.is_fault)


def _key(device_id: str, issue: HealthIssue) -> tuple[str, IssueKind, int | None]:
    return device_id, issue.kind, issue.xid


# While a client watches, the machine is sampled every second.
_RECENT_S = 2.0


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
            PromisedShare(share=share, holder=lease.holder, measured_mb=self.measured.get(key), lease_id=lease.id)
            for lease in self.leases
            if (share := lease.on(device.id)) is not None and (key := (lease.id, device.id))
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
        lives = scheduler.controller.transitions.live.values()
        jobs = {each.attempt.lease_id: each.job.id for each in lives if each.attempt.lease_id is not None}
        contents = await asyncio.to_thread(scheduler.ledger.contents)
        measured = await asyncio.to_thread(measure, snapshot, contents.leases)
        # What leases use that do not say so themselves.
        used, me = await asyncio.to_thread(HostMeter().use_of, contents.leases), scheduler.controller.me
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
    least_mb = scheduler.controller.rules.host.min_free_disk_mb
    watched = scheduler.controller.disk_gate.watched()
    return [copy_fields(machine.DiskRow, each.figure, what=each.what, min_free_mb=least_mb) for each in watched]


def _as_device(users: DeviceUsers, device: Device) -> machine.DeviceRow:
    issues = users.issues.get(device.id, ())
    return copy_fields(
        machine.DeviceRow,
        device,
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
