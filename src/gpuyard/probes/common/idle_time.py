"""For how long at least a process has done nothing on its device, where the driver remembers."""

import time
from collections.abc import Callable, Iterable

from gpuyard.core.snapshot import Device, Snapshot, Vendor

# NVML gives each process's mean use from a moment until now, in whole percent: over more than a minute, what a process
# did in a second would be rounded away.
WINDOWS_S = (1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0)


def idle_seconds(snapshot: Snapshot) -> dict[tuple[str, int], float]:
    """By device and pid; those of which nothing is known are left out."""
    found: dict[tuple[str, int], float] = {}
    for device in snapshot.devices:
        if device.processes:
            times = _SOURCES.get(device.vendor, lambda _: {})(device)
            found.update({(device.id, pid): seconds for pid, seconds in times.items()})
    return found


def longest_idle(pids: Iterable[int], active_within: Callable[[float], set[int] | None]) -> dict[int, float]:
    """For each the longest window in which it was not active; nothing where the driver does not tell."""
    idle = dict.fromkeys(pids, 0.0)
    resting = set(idle)
    for window in WINDOWS_S:
        active = active_within(window)
        if active is None:
            return {}
        resting -= active
        idle.update(dict.fromkeys(resting, window))
    return idle


def _simulated(device: Device) -> dict[int, float]:
    from gpuyard.probes.simulated_devices import SimulatedDevices

    return SimulatedDevices().idle_seconds(device.id)


def _nvidia(device: Device) -> dict[int, float]:
    import pynvml

    def active_within(window_s: float) -> set[int] | None:
        try:
            samples = pynvml.nvmlDeviceGetProcessUtilization(handle, int((time.time() - window_s) * 1e6))
        except pynvml.NVMLError_NotFound:  # nobody did anything
            return set()
        except pynvml.NVMLError:
            return None
        return {sample.pid for sample in samples if sample.smUtil or sample.memUtil}

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(device.id)
    except pynvml.NVMLError:
        return {}
    return longest_idle([process.pid for process in device.processes or ()], active_within)


_SOURCES = {Vendor.SIMULATED: _simulated, Vendor.NVIDIA: _nvidia}
