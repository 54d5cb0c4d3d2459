"""The devices of the machine with their leases and the memory of each: computed once per sample for all clients.

The ledger and the processes are read in a thread: the ledger may be locked for a while, and processes may be many.
"""

import asyncio

from msgspec import Struct

from gpuyard.control.controller import Step
from gpuyard.core.lease import Lease
from gpuyard.core.memory.device_breakdown import Breakdown, break_down
from gpuyard.core.scheduling.device_memory import PromisedShare
from gpuyard.core.scheduling.wait_reasons import describe_holder
from gpuyard.core.snapshot import Device, Snapshot
from gpuyard.core.snapshot_json import iso_time
from gpuyard.daemon.api.codec import copy_fields
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.leases.measured_usage import Measured, measure
from gpuyard.schema.machine import DeviceRow, LeaseRow, MachineState, MemoryParts

# While a client watches, the machine is sampled every second.
_RECENT_S = 2.0


class DeviceUsers(Struct, frozen=True, kw_only=True):
    """The leases on the devices of a snapshot and what they use. `jobs` are the jobs of this queue by lease id."""

    snapshot: Snapshot
    leases: tuple[Lease, ...]
    measured: Measured
    jobs: dict[str, int]

    def breakdown(self, device: Device) -> Breakdown:
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
        self._answer: tuple[DeviceUsers, MachineState] | None = None
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
        leases = await asyncio.to_thread(scheduler.ledger.leases)
        measured = await asyncio.to_thread(measure, snapshot, leases)
        return DeviceUsers(snapshot=snapshot, leases=leases, measured=measured, jobs=jobs)

    async def devices(self) -> MachineState:
        await self._scheduler.sampling.fresh(_RECENT_S)
        users = await self.users()
        if self._answer is None or self._answer[0] is not users:
            snapshot = users.snapshot
            state = MachineState(
                taken_at=iso_time(snapshot.taken_at),
                host=snapshot.host,
                problems=snapshot.problems,
                devices=[_as_device(users, device) for device in snapshot.devices],
            )
            self._answer = users, state
        return self._answer[1]


def _as_device(users: DeviceUsers, device: Device) -> DeviceRow:
    parts = users.breakdown(device)
    return copy_fields(
        device,
        DeviceRow,
        is_usable=device in users.snapshot.usable_devices(),
        memory=copy_fields(
            parts,
            MemoryParts,
            own_mb=parts.own.charged_mb,
            own_used_mb=parts.own.used_mb,
            others_mb=parts.others.charged_mb,
            others_used_mb=parts.others.used_mb,
        ),
        leases=[_as_lease(users, lease, device) for lease in users.leases if lease.on(device.id) is not None],
    )


def _as_lease(users: DeviceUsers, lease: Lease, device: Device) -> LeaseRow:
    share, job_id = lease.on(device.id), users.jobs.get(lease.id)
    return LeaseRow(
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
