"""Rooms that can be shared, the least busy first, so that the best one for a job is found without asking them all.

A job goes where it slows others least, and there where it leaves the least room over. It slows nobody in the rooms at
the beginning of this order: of those that have room for it, the fullest is the best. Behind these, the first that has
room for it is.
"""

import bisect
import math
from collections.abc import Iterable

from gpuyard.core.lease import Need
from gpuyard.core.scheduling.device_fit import Packing, crowded
from gpuyard.core.scheduling.device_memory import UNKNOWN_PERCENT, DeviceRoom

# Jobs that together keep a card no busier than this hardly slow each other.
_COMFORTABLE_PERCENT = 100.0
_ROUNDING = 1e-6

# How busy it will be, what is free, its index and its id, by which rooms are compared; and how busy it is known to be.
_Offer = tuple[float, float, int, str, float, DeviceRoom]


class SharedDevices:
    def __init__(self, rooms: Iterable[DeviceRoom]) -> None:
        self._offers = sorted(offer for offer in map(_offer, rooms) if offer is not None)

    def copy(self) -> "SharedDevices":
        other = SharedDevices(())
        other._offers = self._offers.copy()
        return other

    def exchange(self, before: DeviceRoom, after: DeviceRoom) -> None:
        """One that was here, or was not, for what has become of it."""
        offer = _offer(before)
        place = bisect.bisect_left(self._offers, offer) if offer is not None else len(self._offers)
        if place == len(self._offers) or self._offers[place][-1] is not before:
            return
        del self._offers[place]
        offer = _offer(after)
        if offer is not None:
            bisect.insort(self._offers, offer)

    def best(self, need: Need, packing: Packing) -> DeviceRoom | None:
        """For a job that needs one device and shares it."""
        slows_nobody = bisect.bisect_right(self._offers, (_COMFORTABLE_PERCENT + _ROUNDING - _load(need), math.inf))
        return self._fullest(need, packing, slows_nobody) or self._first(need, packing, slows_nobody)

    def _fullest(self, need: Need, packing: Packing, end: int) -> DeviceRoom | None:
        """Of those up to there."""
        least = -math.inf if need.memory_mb is None else need.memory_mb
        best, free_mb = None, math.inf
        for offer in self._offers[:end]:
            is_fuller = least <= offer[1] <= free_mb and (best is None or offer[1:4] < best[1:4])
            if is_fuller and not crowded(need, offer[-1], packing):
                best, free_mb = offer, offer[1]
        return None if best is None else best[-1]

    def _first(self, need: Need, packing: Packing, start: int) -> DeviceRoom | None:
        """Of those from there on."""
        least = -math.inf if need.memory_mb is None else need.memory_mb
        most = math.inf if packing.max_load_percent is None or need.ignores_load else packing.max_load_percent
        most -= (need.load_percent or 0.0) - _ROUNDING
        roomy = (offer[-1] for offer in self._offers[start:] if offer[1] >= least and offer[4] <= most)
        return next((room for room in roomy if not crowded(need, room, packing)), None)


def unfitness(need: Need, room: DeviceRoom) -> tuple[float, float, int, str]:
    """How much it would slow others, then how much room would be left over."""
    crowding = room.expected_percent + _load(need) - _COMFORTABLE_PERCENT if room.is_loaded else 0.0
    return (
        crowding if crowding > _ROUNDING else 0.0,
        room.free_mb if room.free_mb is not None else math.inf,
        room.device.index or 0,
        room.device.id,
    )


def _load(need: Need) -> float:
    return UNKNOWN_PERCENT if need.load_percent is None else need.load_percent


def _offer(room: DeviceRoom) -> _Offer | None:
    """Return None for a device that is held alone or whose size is unknown. On an idle one a job slows no other."""
    if room.is_alone or room.free_mb is None:
        return None
    device = room.device
    expected = room.expected_percent if room.is_loaded else -math.inf
    known = room.load_percent if room.takers else -math.inf
    return expected, room.free_mb, device.index or 0, device.id, known, room
