"""Measures what live attempts use, sample by sample: memory, load and RAM.

Keeps the progress of attempts, and says when they end by it.

The readings come from outside: a thread reads output and files (`daemon/monitor/job_progress_watch.py`). An end is
recorded after the rest of what its attempt has written was read, with what that says.

Watches running jobs for programs that preallocate, and records once what lets others share the device.
"""

import math
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence

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
        """Keep the last reading of an attempt (job and number) until its end is recorded. None: it could not be read,
        or says nothing."""
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
# A process that holds this part of a device is the one that has jumped.
_LARGE_PART = 0.5


class PreallocationWatch:
    """`loaded_libraries` returns the shared libraries of a process, one path per line."""

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
            attempt, usage = each.attempt, each.attempt.usage
            if usage is None or not usage.peaks_mb or (attempt.job_id, attempt.number) in self._judged:
                continue
            if usage.preallocates:  # an earlier daemon has judged it
                continue
            devices = list(filter(None, map(sample.snapshot.device, attempt.devices)))
            total_mb = sum(device.memory_total_mb or 0.0 for device in devices)
            if not total_mb or sum(usage.peaks_mb.values()) < JUMP_PART * total_mb:
                continue
            self._judged.add((attempt.job_id, attempt.number))
            if has_jumped(usage.curve, total_mb):
                self._judge(each, devices, now)

    def _judge(self, live: Live, devices: list[Device], now: float) -> None:
        job, attempt = live.job, live.attempt
        usage = attempt.usage
        assert usage is not None
        libraries = map(self._loaded_libraries, sorted(_large_processes(devices)))
        traces = "\n".join([f"{job.spec.framework}/" if job.spec.framework else "", *libraries])
        least_mb = min(device.memory_total_mb or 0.0 for device in devices)
        found = find_preallocation(job.argv, job.spec.environment, traces, usage.peak_mb, least_mb)
        if found is not None:
            framework, advice = found
            self._transitions.note_usage(job.id, replace(usage, preallocates=framework))
            self._transitions.store.add_event(job.id, now, EVENT, advice)


def _large_processes(devices: Sequence[Device]) -> set[int]:
    """Return the pids of processes with a large part of a device. The pids on a simulated device may be invented."""
    return {
        process.pid
        for device in devices
        for process in device.processes or ()
        if not device.is_simulated and (process.memory_mb or 0.0) >= _LARGE_PART * (device.memory_total_mb or 0.0)
    }
