"""A crew: the jobs of a tag, that share devices by a rule of their own: so many of them on one device, spread evenly,
and so long between two of their starts.

One of which nobody knows what it needs is given its share of a device: one over `most_per_device`. A little that
strangers hold of the device is taken off the last one's share, so that as many fit as were asked for.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from gpuyard.core.model import Need
from gpuyard.core.refusals import allowed_strangers
from gpuyard.core.room import Room


class Crew(Struct, frozen=True, kw_only=True):
    most_per_device: Annotated[int, Meta(ge=1)]
    stagger_s: Annotated[float, Meta(ge=0)] = 0.0


def spread(need: Need, crew: Crew, rooms: Sequence[Room], counts: Mapping[str, int]) -> list[Need]:
    """The same need in the order in which it is tried: on devices that have the fewest of the crew first. `counts` says
    how many each has; nothing where all but too few have as many as may be."""
    free = [room for room in rooms if counts.get(room.device.id, 0) < crew.most_per_device]
    levels = sorted({counts.get(room.device.id, 0) for room in free})
    need = replace(need, ignores_load=True)
    return [
        way
        for level in levels
        for way in _sized(need, [room for room in free if counts.get(room.device.id, 0) <= level])
    ]


def emptiest(rooms: Sequence[Room], counts: Mapping[str, int], devices: int) -> list[str]:
    """Those with the fewest of the crew."""
    return sorted((room.device.id for room in rooms), key=lambda each: (counts.get(each, 0), each))[:devices]


def anywhere(needs: Sequence[Need]) -> Need:
    """All of them as one, for those who ask what it waits for."""
    ids = dict.fromkeys(device_id for need in needs for device_id in need.only or ())
    sizes = [need.memory_mb for need in needs if need.memory_mb is not None]
    return replace(needs[-1], only=tuple(ids), memory_mb=min(sizes, default=None))


def _sized(need: Need, rooms: Sequence[Room]) -> Iterator[Need]:
    """With its share of such devices; those of one size at a time, where one is enough."""
    if len(rooms) < need.devices:
        return
    if need.part is None:
        yield replace(need, only=_ids(rooms))
        return
    shares = {room.device.id: _share(room, need.part) for room in rooms}
    if need.devices > 1:
        yield replace(need, only=_ids(rooms), memory_mb=min(shares.values()))
        return
    for size in sorted(set(shares.values()), reverse=True):
        yield replace(need, only=tuple(each for each, share in shares.items() if share == size), memory_mb=size)


def _share(room: Room, part: float) -> float:
    whole = part * (room.capacity_mb or 0.0)
    left = room.free_mb if room.free_mb is not None else whole
    return left if 0.0 < whole - left <= min(allowed_strangers(room.device), whole / 2) else whole


def _ids(rooms: Sequence[Room]) -> tuple[str, ...]:
    return tuple(room.device.id for room in rooms)
