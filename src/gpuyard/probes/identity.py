"""Ids that name one device each."""

from collections.abc import Iterable

from msgspec.structs import replace

from gpuyard.core.model import Device


def with_distinct_ids(devices: Iterable[Device]) -> tuple[Device, ...]:
    """The same devices; of those that share an id, as partitions and masked outputs do, the later get a number."""
    taken: dict[str, Device] = {}
    for device in devices:
        new_id, number = device.id, 0
        while new_id in taken:
            number += 1
            new_id = f"{device.id}#{number}"
        taken[new_id] = device if new_id == device.id else replace(device, id=new_id)
    return tuple(taken.values())
