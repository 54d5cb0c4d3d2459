"""Measures what live attempts use, sample by sample: memory, load and RAM; and keeps the progress of attempts.

Readings of progress come from outside: a thread reads output and files (`daemon/monitor/job_progress_watch.py`). An end
is recorded after the rest of what its attempt has written was read, with what that says.
"""

import math
from collections.abc import Callable, Collection, Container, Mapping, Sequence

from msgspec.structs import replace

from gpuyard.errors import EnvironmentFault
from gpuyard.model.job import Attempt, Usage
from gpuyard.model.job_progress import JobProgress, ProgressReading, add_reading
from gpuyard.model.lease import Holder, Lease, Share
from gpuyard.model.lifecycle import JobState
from gpuyard.model.machine_snapshot import Device, Sample, Snapshot
from gpuyard.policy.preallocation import JUMP_PART, find_preallocation, has_jumped
from gpuyard.policy.usage_curve import add_sample
from gpuyard.ports import LeaseLedger
from gpuyard.queue.live_attempts import Live
from gpuyard.queue.transitions import JobTransitions

# Used by the driver itself and by idle foreign processes.
NOTHING_MB = 128.0
# A suspending job may allocate more until it is paused, and has to get all of that back.
_UNSEEN = (JobState.SUSPENDED, JobState.RESUMING)


class UsageTracker:
    def __init__(self, transitions: JobTransitions, leases: LeaseLedger, me: Holder) -> None:
        self._transitions = transitions
        self._leases = leases
        self._no_process = replace(me, pid=-1)
        self.last: Sample | None = None
        self._devices: tuple[Device, ...] = ()
        self.held_mb: dict[int, dict[str, float | None]] = {}  # what each job held in the last reading of its devices
        self.loads: Mapping[tuple[str, str], float | None] = {}  # how busy each lease keeps each device, where known

    def note(self, sample: Sample, now: float, ended: Container[int] = ()) -> None:
        """Update the usage of all live attempts but of those jobs that had `ended`; each sample counts once."""
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
        # Without holder processes: one that is just ending no longer shows its lease, and as a descendant of the daemon
        # it could be counted for any job.
        mine = [
            Lease(
                id=each.attempt.lease_id,
                holder=self._no_process,
                shares=tuple(Share(device_id=device_id) for device_id in each.attempt.devices),
                since=each.attempt.since,
            )
            for each in live
            if each.attempt.lease_id is not None
        ]
        measured = self._measure(sample.snapshot, mine) if mine else {}
        by_process = self._leases.measure_loads(sample.snapshot, tuple(mine)) if mine and not sample.reread else {}
        self.loads = by_process if not sample.reread else self.loads
        for each in live:
            attempt = each.attempt
            key, ran_s = (attempt.job_id, attempt.number), attempt.ran_s(now)
            ram_mb, cpu_s = sample.ram_mb.get(key), sample.cpu_s.get(key)
            memory = {device_id: measured.get((attempt.lease_id or "", device_id)) for device_id in attempt.devices}
            if ram_mb is None and all(used is None for used in memory.values()):
                continue
            self.held_mb[attempt.job_id] = memory
            own = [by_process.get((attempt.lease_id or "", device_id)) for device_id, used in memory.items() if used]
            loads = [load for load in own if load is not None]
            load = max(loads) if own and len(loads) == len(own) else _own_load(each, sharers, devices, memory)
            if sample.reread:  # the load was not read again
                load = None if attempt.usage is None else attempt.usage.load_now
            # Zero on all devices is no peak: the memory is not used yet, or cannot be measured.
            peaks = memory if any(memory.values()) else {}
            usage = add_sample(attempt.usage or Usage(), ran_s, peaks, ram_mb=ram_mb, load_percent=load)
            # In a sample with devices that were read again, the CPU time is that of an earlier one; and most of that of
            # the first second is that of the start.
            if not sample.reread and cpu_s is not None and ran_s >= 1.0:
                usage = replace(usage, cpus_used=round(cpu_s / ran_s, 2))
            self._transitions.note_usage(attempt.job_id, _with_presence(usage, sample.snapshot, attempt, measured))

    def _fresh(self, snapshot: Snapshot) -> list[str]:
        """Return the devices that are other objects than at the last call."""
        known, self._devices = {device.id: device for device in self._devices}, snapshot.devices
        return [device.id for device in snapshot.devices if known.get(device.id) is not device]

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


def _with_presence(
    usage: Usage, snapshot: Snapshot, attempt: Attempt, measured: Mapping[tuple[str, str], float | None]
) -> Usage:
    """Note whether its devices have no process at all, or memory that belongs to no job, such as a container's."""
    devices = list(filter(None, map(snapshot.device, attempt.devices)))
    unused = [each for each in devices if each.processes == () and (each.memory_used_mb or 0.0) < NOTHING_MB]
    if attempt.devices and len(unused) == len(attempt.devices):
        return replace(usage, idle_looks=usage.idle_looks + 1)
    if snapshot.taken_at is not None and snapshot.taken_at < attempt.since:
        return usage  # the last job may still be in it
    for device in devices:
        known = sum((used or 0.0 for (_, device_id), used in measured.items() if device_id == device.id), 0.0)
        if (device.memory_used_mb or 0.0) - known > NOTHING_MB:
            return replace(usage, saw_foreign=True)
    return usage


def _own_load(
    live: Live, sharers: dict[str, list[Live]], devices: Mapping[str, Device], memory: dict[str, float | None]
) -> float | None:
    """Return how busy the job keeps its devices by itself, where the driver says only how busy they are; None beside
    foreign processes, or a job that never leaves the device idle.

    Jobs that share a device each leave it idle for a part of the time, and these parts multiply. Jobs of unknown load
    are assumed to be alike.
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
        if resting < 0.1:  # another one never leaves it idle
            return None
        idle = min(1.0, max(0.0, 1.0 - device.utilization_percent / 100.0) / resting)
        loads.append(100.0 * (1.0 - float(idle ** (1.0 / (1 + len(others) - len(known))))))
    return max(loads, default=None)


class ProgressTracker:
    def __init__(self, transitions: JobTransitions) -> None:
        self._transitions = transitions
        # Reads what an attempt that is over has written, and calls `note_rest` if it says something. Returns False if
        # that takes a while: then it calls it in any case, and wakes the loop.
        self.read_rest: Callable[[Attempt], bool] = lambda _: True
        self._rest: dict[tuple[int, int], ProgressReading | None] = {}
        self._unread: set[tuple[int, int]] = set()

    def note(self, job_id: int, number: int, reading: ProgressReading, now: float) -> None:
        """Add a reading of a live attempt. One of an attempt that is over changes nothing."""
        live = self._transitions.live.get(job_id)
        if live is not None and live.attempt.number == number:
            usage = live.attempt.usage or Usage()
            progress = add_reading(usage.progress or JobProgress(), reading, live.attempt.ran_s(now))
            self._transitions.note_usage(job_id, replace(usage, progress=progress))

    def is_read(self, attempt: Attempt) -> bool:
        """Return whether all was read that an attempt which is over has written. If not, a step follows when it was."""
        key = attempt.job_id, attempt.number
        if key not in self._rest:
            self._rest[key] = None  # a bug in reading keeps no end from being recorded
            if not self.read_rest(attempt):
                self._unread.add(key)
        return key not in self._unread

    def note_rest(self, key: tuple[int, int], reading: ProgressReading | None) -> None:
        """Keep the last reading of an attempt (job and number) until its end is recorded. None: it says nothing."""
        if key in self._rest:
            self._rest[key] = self._rest[key] or reading
            self._unread.discard(key)

    def add_rest(self, live: Live, ended_at: float) -> None:
        reading = self._rest.get((live.job.id, live.attempt.number))
        if reading is not None:
            self.note(live.job.id, live.attempt.number, reading, ended_at)

    def forget(self, recorded: Collection[tuple[int, int]]) -> None:
        for key in recorded:
            self._rest.pop(key, None)


EVENT = "preallocates"


class PreallocationWatch:
    """Watches running jobs for programs that preallocate, and records once what lets others share the device.
    `loaded_libraries` returns the shared libraries of a process, one path per line."""

    def __init__(self, transitions: JobTransitions, loaded_libraries: Callable[[int], str]) -> None:
        self._transitions = transitions
        self._loaded_libraries = loaded_libraries
        self._judged: set[tuple[int, int]] = set()
        self._last: Sample | None = None

    def note(self, sample: Sample, now: float) -> None:
        """Judge each attempt once, when it holds most of its devices; each sample counts once."""
        if sample is self._last:
            return
        self._last = sample
        live = self._transitions.live
        if len(self._judged) > 2 * len(live) + 64:
            self._judged &= {(each.attempt.job_id, each.attempt.number) for each in live.values()}
        for each in [each for on_device in live.on_device.values() for each in on_device.values()]:
            usage, key = each.attempt.usage, (each.attempt.job_id, each.attempt.number)
            # With `preallocates`, an earlier daemon has judged it.
            if usage is None or not usage.peaks_mb or usage.preallocates or key in self._judged:
                continue
            devices = list(filter(None, map(sample.snapshot.device, each.attempt.devices)))
            total_mb = sum(device.memory_total_mb or 0.0 for device in devices)
            if not total_mb or sum(usage.peaks_mb.values()) < JUMP_PART * total_mb:
                continue
            self._judged.add(key)
            if has_jumped(usage.curve, total_mb):
                self._judge(each, devices, now)

    def _judge(self, live: Live, devices: list[Device], now: float) -> None:
        job, usage = live.job, live.attempt.usage
        assert usage is not None
        # A process with half of a device is the one that has jumped. The pids on a simulated device may be invented.
        large = {
            process.pid
            for device in devices
            for process in device.processes or ()
            if not device.is_simulated and (process.memory_mb or 0.0) >= 0.5 * (device.memory_total_mb or 0.0)
        }
        libraries = map(self._loaded_libraries, sorted(large))
        traces = "\n".join([f"{job.spec.framework}/" if job.spec.framework else "", *libraries])
        least_mb = min(device.memory_total_mb or 0.0 for device in devices)
        found = find_preallocation(job.argv, job.spec.environment, traces, usage.peak_mb, least_mb)
        if found is not None:
            framework, advice = found
            self._transitions.note_usage(job.id, replace(usage, preallocates=framework))
            self._transitions.store.add_event(job.id, now, EVENT, advice)
