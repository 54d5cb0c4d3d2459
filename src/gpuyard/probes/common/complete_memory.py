"""Correct the memory figures of a device by what is known about its host and its vendor.

Rules:
- A total of zero means that the memory was not read: all three figures are unknown.
- NVIDIA's integrated GPUs (GB10, Jetson) have no memory of their own: NVML answers "not supported" and `nvidia-smi`
  prints "[N/A]". Such a device has the host's memory, within the host's limits: what is available to the host is free.
- A process cannot hold more than its device has. A larger figure covers something else, such as all devices
  together, so the process's memory on this device is unknown.
"""

import re

from msgspec.structs import replace

from gpuyard.core.snapshot import Device, Host, Process, Vendor

# As NVML names them: "NVIDIA GB10", "NVIDIA Thor", "Orin (nvgpu)".
_INTEGRATED = re.compile(r"\b(?:GB10|Thor|Orin|Xavier|Jetson|Tegra)\b", re.IGNORECASE)


def complete_memory(device: Device, host: Host) -> Device:
    """Return the device with host memory filled in and impossible figures removed."""
    if device.memory_total_mb == 0:
        device = replace(device, memory_total_mb=None, memory_used_mb=None, memory_free_mb=None)
    if _uses_host_memory(device):
        device = _with_host_memory(device, host)
    return _without_impossible_processes(device)


def _uses_host_memory(device: Device) -> bool:
    figures = (device.memory_total_mb, device.memory_used_mb, device.memory_free_mb)
    is_unread = device.healthy and figures == (None,) * 3
    return is_unread and device.vendor is Vendor.NVIDIA and bool(_INTEGRATED.search(device.name or ""))


def _with_host_memory(device: Device, host: Host) -> Device:
    total, free = host.memory_total_mb, host.memory_available_mb
    used = None if total is None or free is None else round(max(0.0, total - free), 2)
    return replace(device, memory_total_mb=total, memory_used_mb=used, memory_free_mb=free)


def _without_impossible_processes(device: Device) -> Device:
    total = device.memory_total_mb
    if total is None or not any(_is_above(process, total) for process in device.processes or ()):
        return device
    processes = (
        replace(process, memory_mb=None) if _is_above(process, total) else process for process in device.processes or ()
    )
    return replace(device, processes=tuple(processes))


def _is_above(process: Process, total_mb: float) -> bool:
    return process.memory_mb is not None and process.memory_mb > total_mb
