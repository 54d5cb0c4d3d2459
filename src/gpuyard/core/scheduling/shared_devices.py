"""Devices that can be shared, the least busy first, so that the best one for a job is found without checking all.

The best device is where the job slows others least, and among those the one with the least free memory. The job slows
no other on the devices at the start of this order: of those with enough memory, the fullest is the best. Behind them,
the first with enough memory is the best.
"""

import bisect
import math
from collections.abc import Iterable

from gpuyard.core.lease import Need
from gpuyard.core.scheduling.device_fit import Packing, check_capacity
from gpuyard.core.scheduling.device_memory import UNKNOWN_PERCENT, DeviceState

# Jobs that together keep a card no busier than this hardly slow each other.
_COMFORTABLE_PERCENT = 100.0
_ROUNDING = 1e-6

# The sort key (expected load, free memory, index, id), then the known load and the device's state.
_Offer = tuple[float, float, int, str, float, DeviceState]


class SharedDevices:
    def __init__(self, states: Iterable[DeviceState]) -> None:
        self._offers = sorted(offer for offer in map(_offer, states) if offer is not None)

    def copy(self) -> "SharedDevices":
        other = SharedDevices(())
        other._offers = self._offers.copy()
        return other

    def replace(self, before: DeviceState, after: DeviceState) -> None:
        """Replace a device's state. Does nothing if `before` is not in this set."""
        offer = _offer(before)
        place = bisect.bisect_left(self._offers, offer) if offer is not None else len(self._offers)
        if place == len(self._offers) or self._offers[place][-1] is not before:
            return
        del self._offers[place]
        offer = _offer(after)
        if offer is not None:
            bisect.insort(self._offers, offer)

    def best(self, need: Need, packing: Packing) -> DeviceState | None:
        """Return the best device for a job that needs a share of one device."""
        least = -math.inf if need.least_mb is None else need.least_mb
        slowing = bisect.bisect_right(self._offers, (_COMFORTABLE_PERCENT + _ROUNDING - _load(need), math.inf))
        best, free_mb = None, math.inf
        for offer in self._offers[:slowing]:
            is_fuller = least <= offer[1] <= free_mb and (best is None or offer[1:4] < best[1:4])
            if is_fuller and not check_capacity(need, offer[-1], packing):
                best, free_mb = offer, offer[1]
        if best is not None:
            return best[-1]
        most = math.inf if packing.max_load_percent is None or need.ignores_load else packing.max_load_percent
        most -= (need.load_percent or 0.0) - _ROUNDING
        large = (offer[-1] for offer in self._offers[slowing:] if offer[1] >= least and offer[4] <= most)
        return next((state for state in large if not check_capacity(need, state, packing)), None)


def placement_cost(need: Need, state: DeviceState) -> tuple[float, float, int, str]:
    """Return a sort key: how much the job would slow others there, then how much memory would be left over."""
    crowding = state.expected_percent + _load(need) - _COMFORTABLE_PERCENT if state.is_loaded else 0.0
    return (
        crowding if crowding > _ROUNDING else 0.0,
        state.free_mb if state.free_mb is not None else math.inf,
        state.device.index or 0,
        state.device.id,
    )


def _load(need: Need) -> float:
    return UNKNOWN_PERCENT if need.load_percent is None else need.load_percent


def _offer(state: DeviceState) -> _Offer | None:
    """Return None for a device that is held exclusively or of unknown size. On an idle device a job slows no other."""
    if state.is_exclusive or state.free_mb is None:
        return None
    device = state.device
    expected = state.expected_percent if state.is_loaded else -math.inf
    known = state.load_percent if state.lease_count else -math.inf
    return expected, state.free_mb, device.index or 0, device.id, known, state
