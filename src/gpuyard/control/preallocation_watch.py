"""Watches running jobs for programs that preallocate, and records once what lets others share the device."""

from collections.abc import Callable

from msgspec.structs import replace

from gpuyard.control.live_jobs import Live
from gpuyard.control.transitions import JobTransitions
from gpuyard.core.memory.preallocation import has_jumped, preallocation_advice
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

    def note(self, sample: Sample, now: float) -> None:
        """Judge each attempt once, after its memory has jumped."""
        live = self._transitions.live
        self._judged &= {(each.attempt.job_id, each.attempt.number) for each in live.values()}
        for each in list(live.values()):
            attempt = each.attempt
            key = (attempt.job_id, attempt.number)
            if key in self._judged or attempt.usage is None or not attempt.usage.peaks_mb:
                continue
            devices = list(filter(None, map(sample.snapshot.device, attempt.devices)))
            total_mb = sum(device.memory_total_mb or 0.0 for device in devices)
            if total_mb and has_jumped(attempt.usage.curve, total_mb):
                self._judged.add(key)
                self._judge(each, devices, now)

    def _judge(self, live: Live, devices: list[Device], now: float) -> None:
        job, attempt = live.job, live.attempt
        usage = attempt.usage
        assert usage is not None
        pids = {
            process.pid
            for device in devices
            for process in device.processes or ()
            if (process.memory_mb or 0.0) >= _LARGE_PART * (device.memory_total_mb or 0.0)
        }
        pids |= set() if pids or attempt.pid is None else {attempt.pid}  # the driver lists no processes
        libraries = map(self._loaded_libraries, sorted(pids))
        traces = "\n".join([f"{job.spec.framework}/" if job.spec.framework else "", *libraries])
        least_mb = min(device.memory_total_mb or 0.0 for device in devices)
        advice = preallocation_advice(job.argv, job.spec.environment, traces, usage.peak_mb, least_mb)
        if advice is not None:
            self._transitions.note_usage(job.id, replace(usage, preallocates=True))
            self._transitions.store.add_event(job.id, now, EVENT, advice)
