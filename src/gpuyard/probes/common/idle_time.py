"""How long a process has been idle on its device, as a lower bound, where the driver records it."""

import time
from collections.abc import Callable, Iterable

from gpuyard.core.snapshot import Device, Snapshot, Vendor

# NVML reports the mean load of each process since a given time in whole percent: over more than a minute, a busy second
# would be rounded to zero.
WINDOWS_S = (1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0)


def idle_seconds(snapshot: Snapshot) -> dict[tuple[str, int], float]:
    """Return idle seconds by (device id, pid). Processes without a known idle time are left out."""
    found: dict[tuple[str, int], float] = {}
    for device in snapshot.devices:
        times: dict[int, float] = {}
        if device.processes and device.is_simulated:
            from gpuyard.probes.simulated_devices import SimulatedDevices

            times = SimulatedDevices().idle_seconds(device.id)
        elif device.processes and device.vendor is Vendor.NVIDIA:
            times = _nvidia(device)
        found.update({(device.id, pid): seconds for pid, seconds in times.items()})
    return found


def longest_idle(pids: Iterable[int], active_within: Callable[[float], set[int] | None]) -> dict[int, float]:
    """Return for each pid the longest window without activity; empty if the driver reports no activity."""
    idle = dict.fromkeys(pids, 0.0)
    idle_pids = set(idle)
    for window in WINDOWS_S:
        active = active_within(window)
        if active is None:
            return {}
        idle_pids -= active
        idle.update(dict.fromkeys(idle_pids, window))
    return idle


def _nvidia(device: Device) -> dict[int, float]:
    import pynvml

    def active_within(window_s: float) -> set[int] | None:
        try:
            samples = pynvml.nvmlDeviceGetProcessUtilization(handle, int((time.time() - window_s) * 1e6))
        except pynvml.NVMLError_NotFound:  # no process was active
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
