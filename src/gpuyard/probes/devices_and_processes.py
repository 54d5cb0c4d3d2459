"""Devices and processes as probes report them: unique device ids, PCI bus ids in one spelling, and each process listed
once, with its user and command as far as this user may see them, and with its idle time, where the driver records it.
"""

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.model.machine_snapshot import Device, Process, Snapshot, Vendor
from gpuyard.model.printable_text import printable

_BUS_ID = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", re.IGNORECASE | re.ASCII)


def pci_bus_id(raw: object) -> str | None:
    """Return the bus id as the kernel spells it (`0000:3b:00.0`), or None. Tools differ in domain width and case."""
    match = _BUS_ID.fullmatch(raw.strip()) if isinstance(raw, str) else None
    return f"{int(match[1] or '0', 16):04x}:{match[2].lower()}" if match else None


def with_distinct_ids(devices: Iterable[Device]) -> tuple[Device, ...]:
    """Return the devices with "#0", "#1", ... appended to ids that several share, as partitions and masked outputs do.
    The first gets a number too, so that no partition passes for the whole card."""
    listed = tuple(devices)
    times = Counter(device.id for device in listed)
    numbers: Counter[str] = Counter()
    taken = set(times)
    distinct = []
    for device in listed:
        new_id = device.id
        while times[device.id] > 1 and new_id in taken:
            new_id = f"{device.id}#{numbers[device.id]}"
            numbers[device.id] += 1
        taken.add(new_id)
        distinct.append(device if new_id == device.id else replace(device, id=new_id))
    return tuple(distinct)


def without_number(device_id: str) -> str:
    """Return the id without the number that `with_distinct_ids` appended."""
    return device_id.partition("#")[0]


def one_per_pid(listed: Iterable[Process], *, adds: bool = False) -> tuple[Process, ...]:
    """Return each process once, in the order of the first entries. One that is listed twice, as compute (C) and
    graphics (G), is so with all of its memory. `adds`: with a part of it; one unknown part makes the sum unknown."""
    found: dict[int, Process] = {}
    for entry in listed:
        known = found.setdefault(entry.pid, entry)
        if known is not entry:
            parts = [mb for mb in (known.memory_mb, entry.memory_mb) if mb is not None]
            memory_mb = max(parts, default=None)
            if adds:
                memory_mb = round(sum(parts), 2) if len(parts) == 2 else None
            found[entry.pid] = Process(pid=entry.pid, memory_mb=memory_mb, name=known.name or entry.name)
    return tuple(found.values())


def without_memory_above(device: Device, most_mb: float | None) -> Device:
    """Return the device, with unknown memory for each process that seems to hold more."""
    if most_mb is None or all((each.memory_mb or 0.0) <= most_mb for each in device.processes or ()):
        return device
    processes = (
        each if (each.memory_mb or 0.0) <= most_mb else replace(each, memory_mb=None) for each in device.processes or ()
    )
    return replace(device, processes=tuple(processes))


class ProcessInfo(Struct, frozen=True, kw_only=True):
    user: str | None = None
    command: str | None = None


def describe_processes(pids: Iterable[int]) -> dict[int, ProcessInfo]:
    """Return an entry for each live pid. A driver may report pids of another container, which do not exist here."""
    import psutil

    found = {}
    for pid in pids:
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                argv, name = process.cmdline(), process.name()
                command = " ".join([os.path.basename(argv[0]), *argv[1:]]) if argv and argv[0] else name
                found[pid] = ProcessInfo(user=printable(process.username()), command=printable(command))
        except (psutil.Error, OSError, KeyError):
            continue
    return found


def idle_seconds(snapshot: Snapshot) -> dict[tuple[str, int], float]:
    """Return idle seconds by (device id, pid). Processes without a known idle time are left out."""
    found: dict[tuple[str, int], float] = {}
    for device in snapshot.devices:
        times: dict[int, float] = {}
        if device.processes and device.is_simulated:
            from gpuyard.probes.simulated_devices import SimulatedDevices

            times = SimulatedDevices().idle_seconds(device.id)
        elif device.processes and device.vendor is Vendor.NVIDIA:
            times = _nvidia_idle_seconds(device)
        found.update({(device.id, pid): seconds for pid, seconds in times.items()})
    return found


def longest_idle(pids: Iterable[int], active_within: Callable[[float], set[int] | None]) -> dict[int, float]:
    """Return for each pid the longest window without activity; empty if the driver reports no activity."""
    idle = dict.fromkeys(pids, 0.0)
    idle_pids = set(idle)
    # NVML reports mean loads in whole percent: over more than a minute, a busy second would be rounded to zero.
    for window_s in (1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0):
        active = active_within(window_s)
        if active is None:
            return {}
        idle_pids -= active
        idle.update(dict.fromkeys(idle_pids, window_s))
    return idle


def _nvidia_idle_seconds(device: Device) -> dict[int, float]:
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
