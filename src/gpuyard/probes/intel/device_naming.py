"""Ids and processes of Intel devices, the same for every tool.

Rules:
- A device's id is the vendor's UUID, else its PCI bus id such as `0000:03:00.0`, else `intel-<index>`.
- Early drivers give every card of one model the same UUID: such cards are identified by PCI bus id.
- A process is listed once, with the memory of all its clients; one unknown part makes the sum unknown.
- Level Zero may count a buffer several times for one process (intel/compute-runtime#964): the memory
  of a process that would exceed the used memory of the device is unknown.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import structs

from gpuyard.core.snapshot import Device, Process
from gpuyard.probes.common import parse_numbers
from gpuyard.probes.common.device_ids import with_distinct_ids

_MAX_PID = 2**31
_MAX_INDEX = 2**16


def device_index(raw: Any) -> int | None:
    value = parse_numbers.whole(raw)
    return value if value is not None and value < _MAX_INDEX else None


def process_id(raw: Any) -> int | None:
    value = parse_numbers.whole(raw)
    return value if value is not None and 0 < value < _MAX_PID else None


def device_id(index: int | None, uuid: str | None = None, pci_bus_id: str | None = None) -> str:
    return uuid or pci_bus_id or f"intel-{index or 0}"


def without_shared_uuids(devices: Sequence[Device]) -> tuple[Device, ...]:
    times = Counter(device.id for device in devices)
    return with_distinct_ids(
        structs.replace(device, id=device_id(device.index, None, device.pci_bus_id)) if times[device.id] > 1 else device
        for device in devices
    )


def one_per_pid(clients: Iterable[Process]) -> tuple[Process, ...]:
    merged: dict[int, Process] = {}
    for client in clients:
        known = merged.get(client.pid)
        merged[client.pid] = client if known is None else _joined(known, client)
    return tuple(merged[pid] for pid in sorted(merged))


def within_used(processes: tuple[Process, ...] | None, used_mb: float | None) -> tuple[Process, ...] | None:
    """Return the processes, without memory figures above the device's used memory."""
    if processes is None or used_mb is None:
        return processes
    return tuple(
        structs.replace(process, memory_mb=None) if (process.memory_mb or 0.0) > used_mb else process
        for process in processes
    )


def _joined(one: Process, other: Process) -> Process:
    known = one.memory_mb is not None and other.memory_mb is not None
    memory = round((one.memory_mb or 0.0) + (other.memory_mb or 0.0), 2) if known else None
    return Process(pid=one.pid, memory_mb=memory, name=one.name or other.name)
