"""A crew: the jobs of a tag, that share devices by a rule of their own: so many of them on one device, spread evenly,
and so long between two of their starts.

A job whose memory is unknown reserves an equal share of what others leave: the free memory, divided by the places that
the crew has left on the device. So as many fit as were asked for, also beside a desktop. A share is at most one over
`most_per_device` of the device, and at least half of that: where less is free, the job waits.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from gpuyard.core.lease import Need
from gpuyard.core.scheduling.device_memory import DeviceRoom
from gpuyard.core.scheduling.shared_devices import unfitness

# Of its full share: a job that is given less than this would probably run out of memory.
_LEAST_PART = 0.5


class TagSharing(Struct, frozen=True, kw_only=True):
    most_per_device: Annotated[int, Meta(ge=1)]
    stagger_s: Annotated[float, Meta(ge=0)] = 0.0


def spread(need: Need, crew: TagSharing, rooms: Sequence[DeviceRoom], counts: Mapping[str, int]) -> list[Need]:
    """The same need in the order in which it is tried: on devices that have the fewest of the crew first. `counts` says
    how many each has; nothing where all but too few have as many as may be."""
    free = [room for room in rooms if counts.get(room.device.id, 0) < crew.most_per_device]
    places = {room.device.id: crew.most_per_device - counts.get(room.device.id, 0) for room in free}
    levels = sorted(set(places.values()), reverse=True)
    need = replace(need, ignores_load=True)
    return [
        way
        for level in levels
        for way in _sized(need, [room for room in free if places[room.device.id] >= level], places)
    ]


def emptiest(rooms: Sequence[DeviceRoom], counts: Mapping[str, int], devices: int) -> list[str]:
    """Those with the fewest of the crew."""
    return sorted((room.device.id for room in rooms), key=lambda each: (counts.get(each, 0), each))[:devices]


def anywhere(needs: Sequence[Need]) -> Need:
    """All of them as one, for those who ask what it waits for."""
    ids = dict.fromkeys(device_id for need in needs for device_id in need.only or ())
    sizes = [need.memory_mb for need in needs if need.memory_mb is not None]
    return replace(needs[-1], only=tuple(ids), memory_mb=min(sizes, default=None))


def _sized(need: Need, rooms: Sequence[DeviceRoom], places: Mapping[str, int]) -> Iterator[Need]:
    """With its share of such devices; where one is enough, first those where it slows others least, then those where
    its share is largest."""
    if len(rooms) < need.devices:
        return
    if need.part is None:
        yield replace(need, only=_ids(rooms))
        return
    shares = {room.device.id: _share(room, need.part, places[room.device.id]) for room in rooms}
    if need.devices > 1:
        roomy = [share for room in rooms if (share := shares[room.device.id]) <= (room.free_mb or 0.0)]
        yield replace(need, only=_ids(rooms), memory_mb=min(roomy or shares.values()))
        return

    def rank(room: DeviceRoom) -> tuple[float, float]:
        return unfitness(need, room)[0], -shares[room.device.id]

    for (_, share), alike in itertools.groupby(sorted(rooms, key=rank), key=rank):
        yield replace(need, only=_ids(alike), memory_mb=-share)


def _share(room: DeviceRoom, part: float, places: int) -> float:
    """Whole MB, so that rounding never makes the shares exceed what is free."""
    full = part * (room.capacity_mb or 0.0)
    equal = full if room.free_mb is None else math.floor(room.free_mb / places)
    return min(full, max(equal, full * _LEAST_PART))


def _ids(rooms: Iterable[DeviceRoom]) -> tuple[str, ...]:
    return tuple(room.device.id for room in rooms)
