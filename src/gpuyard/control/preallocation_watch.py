"""Watches running jobs for programs that preallocate, and records once what lets others share the device."""

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from gpuyard.control.live_jobs import Live
from gpuyard.control.transitions import JobTransitions
from gpuyard.core.memory.preallocation import JUMP_PART, find_preallocation, has_jumped
from gpuyard.core.snapshot import Device, Sample

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
