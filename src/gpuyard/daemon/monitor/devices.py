"""The devices of the machine with their leases and the memory of each.

The list is computed once per sample for all clients. The ledger and the processes are read in a thread: the ledger may
be locked for a while, and processes may be many.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from msgspec import Struct

from gpuyard.control.step_result import Step
from gpuyard.core.lease import Drain, Lease
from gpuyard.core.memory.device_breakdown import MemoryParts, break_down
from gpuyard.core.scheduling.closed_devices import drain_of
from gpuyard.core.scheduling.device_health import HealthIssue
from gpuyard.core.scheduling.device_memory import PromisedShare
from gpuyard.core.scheduling.host_capacity import HostReserved, HostState, HostView, sum_reserved
from gpuyard.core.scheduling.wait_reasons import describe_holder
from gpuyard.core.snapshot import Device, Snapshot
from gpuyard.daemon.api.codec import copy_fields
from gpuyard.daemon.api.wall_time import wall_time
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.monitor.device_health import HealthMonitor
from gpuyard.leases.clear_devices import clear_devices
from gpuyard.leases.drain_devices import drain_devices, undrain_devices
from gpuyard.leases.host_usage import HostMeter
from gpuyard.leases.measured_usage import Measured, measure
from gpuyard.schema import machine
from gpuyard.schema.requests import DrainRequest, UndrainRequest

# While a client watches, the machine is sampled every second.
_RECENT_S = 2.0

T = TypeVar("T")


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
