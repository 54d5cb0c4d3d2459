"""How long a process on a device has done nothing there, where the driver remembers."""

import time
from typing import Any

from gpuyard.core.model import Device, Snapshot, Vendor


def idle_seconds(snapshot: Snapshot) -> dict[tuple[str, int], float]:
    """By device and pid; those of which nothing is known are left out."""
    found: dict[tuple[str, int], float] = {}
    for device in snapshot.devices:
        if device.processes:
            times = _SOURCES.get(device.vendor, lambda _: {})(device)
            found.update({(device.id, pid): seconds for pid, seconds in times.items()})
    return found


def _simulated(device: Device) -> dict[int, float]:
    from gpuyard.probes.simulated import SimulatedDevices

    return SimulatedDevices().idle_seconds(device.id)


def _nvidia(device: Device) -> dict[int, float]:
    """The driver keeps samples of who used the processors of a card, with their times in microseconds."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(device.id)
        samples = pynvml.nvmlDeviceGetProcessUtilization(handle, 0)
    except pynvml.NVMLError:
        return {}
    now = time.time()
    last: dict[int, float] = {}
    for sample in samples:
        if _is_active(sample):
            last[sample.pid] = max(last.get(sample.pid, 0.0), sample.timeStamp / 1e6)
    return {pid: max(0.0, now - moment) for pid, moment in last.items()}


def _is_active(sample: Any) -> bool:
    return bool(sample.smUtil or sample.memUtil)


_SOURCES = {Vendor.SIMULATED: _simulated, Vendor.NVIDIA: _nvidia}
