"""Measures what live attempts use, sample by sample: memory, load and RAM."""

import math
from collections.abc import Container, Iterable, Mapping, Sequence

from msgspec.structs import replace

from gpuyard.control.live_jobs import Live
from gpuyard.control.transitions import JobTransitions
from gpuyard.core.job.job import Attempt, Usage
from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.lease import Holder, Lease, Share
from gpuyard.core.memory.usage_curve import add_sample
from gpuyard.core.snapshot import Device, Sample, Snapshot
from gpuyard.errors import EnvironmentFault
from gpuyard.ports import LeaseLedger

# Used by the driver itself and by idle foreign processes.
NOTHING_MB = 128.0
_NO_PID = -1
_NEVER_RESTS = 0.1
# A suspending job may allocate more until it is paused, and has to get all of that back.
_UNSEEN = (JobState.SUSPENDED, JobState.RESUMING)
_LEAST_CPU_S = 1.0  # of a shorter run, most CPU time is that of its start


class UsageTracker:
    def __init__(self, transitions: JobTransitions, leases: LeaseLedger, me: Holder) -> None:
        self._transitions = transitions
        self._leases = leases
        self._no_process = replace(me, pid=_NO_PID)
        self.last: Sample | None = None
        self._devices: tuple[Device, ...] = ()
        self.held_mb: dict[int, dict[str, float | None]] = {}  # what each job held in the last reading of its devices
        self.loads: Mapping[tuple[str, str], float | None] = {}  # how busy each lease keeps each device, where known

    def note(self, sample: Sample, now: float, ended: Container[int] = ()) -> None:
        """Update the usage of all live attempts; each sample counts once. `ended` are the jobs whose programs were gone
        when it was taken."""
        if sample is self.last:
            return
        self.last = sample
        jobs, devices = self._transitions.live, {device.id: device for device in sample.snapshot.devices}
        fresh = self._fresh(sample.snapshot)
        for gone in self.held_mb.keys() - jobs.keys():
            del self.held_mb[gone]
        # A device that is the identical object was not read again: it adds nothing.
        read = {job_id: each for device_id in fresh for job_id, each in jobs.on_device.get(device_id, {}).items()}
        if not sample.reread:  # RAM is measured
            read |= jobs.without_devices
        live = [each for each in read.values() if each.job.state not in _UNSEEN]
        sharers = {
            device_id: [
                each
                for each in jobs.on_device[device_id].values()
                if each.job.id not in ended and each.job.state not in _UNSEEN
            ]
            for device_id in {device_id for each in live for device_id in each.attempt.devices}
        }
        mine = [self._lease_of(each.attempt) for each in live if each.attempt.lease_id is not None]
        measured = self._measure(sample.snapshot, mine) if mine else {}
        by_process = self._leases.measure_loads(sample.snapshot, tuple(mine)) if mine and not sample.reread else {}
        self.loads = by_process if not sample.reread else self.loads
        for each in live:
            attempt = each.attempt
            ram_mb = sample.ram_mb.get((attempt.job_id, attempt.number))
            memory = {device_id: measured.get((attempt.lease_id or "", device_id)) for device_id in attempt.devices}
            if ram_mb is None and all(used is None for used in memory.values()):
                continue
            self.held_mb[attempt.job_id] = memory
            own = [by_process.get((attempt.lease_id or "", device_id)) for device_id, used in memory.items() if used]
            load = _largest(own) if own and None not in own else _own_load(each, sharers, devices, memory)
            if sample.reread:  # the load was not read again
                load = None if attempt.usage is None else attempt.usage.load_now
            # Zero on all devices is no peak: the memory is not used yet, or cannot be measured.
            peaks = memory if any(memory.values()) else {}
            usage = add_sample(attempt.usage or Usage(), attempt.ran_s(now), peaks, ram_mb=ram_mb, load_percent=load)
            usage = _with_cpus_used(usage, sample, attempt, now)
            if attempt.devices and all(_is_unused(devices.get(device_id)) for device_id in attempt.devices):
                usage = replace(usage, idle_looks=usage.idle_looks + 1)
            elif _is_since(sample.snapshot, attempt) and _has_foreign(attempt, devices, measured):
                usage = replace(usage, saw_foreign=True)
            self._transitions.note_usage(attempt.job_id, usage)

    def _fresh(self, snapshot: Snapshot) -> list[str]:
        """Return the devices that are other objects than at the last call. Mostly they are listed in the same order."""
        before, self._devices = self._devices, snapshot.devices
        if len(before) == len(snapshot.devices):
            changed = [(now, then) for now, then in zip(snapshot.devices, before, strict=True) if now is not then]
            if all(now.id == then.id for now, then in changed):
                return [now.id for now, _ in changed]
        known = {device.id: device for device in before}
        return [device.id for device in snapshot.devices if known.get(device.id) is not device]

    def _lease_of(self, attempt: Attempt) -> Lease:
        """Return the lease without its holder process: a process that is just ending no longer shows its lease, and as
        a descendant of the daemon it could be counted for any job."""
        shares = tuple(Share(device_id=device_id) for device_id in attempt.devices)
        return Lease(id=attempt.lease_id or "", holder=self._no_process, shares=shares, since=attempt.since)

    def _measure(self, snapshot: Snapshot, mine: Sequence[Lease]) -> Mapping[tuple[str, str], float | None]:
        """Return the memory of each lease's processes. If the driver hides them, it depends on all other leases."""
        measured = self._leases.measure(snapshot, tuple(mine))
        hidden = snapshot.hiding
        if not any(lease.on(device_id) for lease in mine for device_id in hidden):
            return measured
        by_growth = self._leases.measure(snapshot, self.all_leases())
        return {**measured, **{key: used for key, used in by_growth.items() if key[1] in hidden}}

    def all_leases(self) -> tuple[Lease, ...]:
        """Return the leases of all users; none if the ledger cannot be read."""
        try:
            return self._leases.read()[0]
        except EnvironmentFault:
            return ()


def _is_unused(device: Device | None) -> bool:
    """Return whether no process at all is on the device, our own included."""
    return device is not None and device.processes == () and (device.memory_used_mb or 0.0) < NOTHING_MB


def _is_since(snapshot: Snapshot, attempt: Attempt) -> bool:
    """Return whether the snapshot was taken since the attempt began: before, the last job may still be in it."""
    return snapshot.taken_at is None or snapshot.taken_at >= attempt.since


def _has_foreign(
    attempt: Attempt, devices: Mapping[str, Device], measured: Mapping[tuple[str, str], float | None]
) -> bool:
    """Return whether memory is in use on its devices that belongs to no job, such as that of a container's program."""
    for device in filter(None, map(devices.get, attempt.devices)):
        known = sum((used or 0.0 for (_, device_id), used in measured.items() if device_id == device.id), 0.0)
        if (device.memory_used_mb or 0.0) - known > NOTHING_MB:
            return True
    return False


def _with_cpus_used(usage: Usage, sample: Sample, attempt: Attempt, now: float) -> Usage:
    ran_s, cpu_s = attempt.ran_s(now), sample.cpu_s.get((attempt.job_id, attempt.number))
    # In a sample with devices that were read again, the CPU time is that of an earlier one.
    if sample.reread or cpu_s is None or ran_s < _LEAST_CPU_S:
        return usage
    return replace(usage, cpus_used=round(cpu_s / ran_s, 2))


def _largest(figures: Iterable[float | None]) -> float | None:
    return max((figure for figure in figures if figure is not None), default=None)


def _own_load(
    live: Live, sharers: dict[str, list[Live]], devices: Mapping[str, Device], memory: dict[str, float | None]
) -> float | None:
    """Return how busy the job keeps its devices by itself, where the driver says only how busy they are; None beside
    foreign processes.

    Jobs that share a device each leave it idle for a part of the time, and these parts multiply. Jobs of unknown load
    are assumed to be alike. Beside a job that never leaves the device idle, the load cannot be determined.
    """
    loads = []
    for device_id, used in memory.items():
        device = devices.get(device_id)
        if device is None or device.utilization_percent is None or not used:
            return None
        others = [each.attempt.usage for each in sharers.get(device_id, ()) if each is not live]
        ours = used + sum((each.peaks_mb.get(device_id, 0.0) for each in others if each is not None), 0.0)
        if (device.memory_used_mb or 0.0) - ours > max(NOTHING_MB, 0.05 * (device.memory_total_mb or 0.0)):
            return None
        known = [each.load_percent for each in others if each is not None and each.load_percent is not None]
        resting = math.prod(1.0 - min(1.0, load / 100.0) for load in known)
        if resting < _NEVER_RESTS:
            return None
        idle = min(1.0, max(0.0, 1.0 - device.utilization_percent / 100.0) / resting)
        loads.append(100.0 * (1.0 - float(idle ** (1.0 / (1 + len(others) - len(known))))))
    return max(loads, default=None)
