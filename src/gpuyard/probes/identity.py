"""Ids that name one device each."""

from collections import Counter
from collections.abc import Iterable

from msgspec.structs import replace

from gpuyard.core.model import Device


def with_distinct_ids(devices: Iterable[Device]) -> tuple[Device, ...]:
    """The same devices, with "#0", "#1", ... behind an id that several share, as partitions and masked outputs do.

    The first gets its number too: none of them may pass for the whole.
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
    """What an id was before it was told apart from others."""
    return device_id.partition("#")[0]
