"""Unique device ids, and PCI bus ids in one spelling."""

import re
from collections import Counter
from collections.abc import Iterable

from msgspec.structs import replace

from gpuyard.core.snapshot import Device

_BUS_ID = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", re.IGNORECASE | re.ASCII)


def pci_bus_id(raw: object) -> str | None:
    """Return the bus id as the kernel spells it (`0000:3b:00.0`), or None. Tools differ in domain width and case."""
    match = _BUS_ID.fullmatch(raw.strip()) if isinstance(raw, str) else None
    if match is None:
        return None
    domain = int(match[1] or "0", 16)
    return f"{domain:04x}:{match[2].lower()}"


def with_distinct_ids(devices: Iterable[Device]) -> tuple[Device, ...]:
    """Return the devices with "#0", "#1", ... appended to ids that several share, as partitions and masked outputs do.

    The first gets a number too, so that no partition passes for the whole card.
    """
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
