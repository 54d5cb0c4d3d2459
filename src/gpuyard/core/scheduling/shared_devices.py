"""Devices that can be shared, the least busy first, so that the best one for a job is found without checking all.

The best device is where the job slows others least, and among those the one with the least free memory. The job slows
no other on the devices at the start of this order: of those with enough memory, the fullest is the best. Behind them,
the first with enough memory is the best.
"""

import bisect
import math
from collections.abc import Callable, Iterable

from gpuyard.core.lease import Need
from gpuyard.core.scheduling.device_fit import Packing, check_capacity
from gpuyard.core.scheduling.device_memory import LAST_CHOICE_PERCENT, UNKNOWN_PERCENT, DeviceState

# Jobs that together keep a card no busier than this hardly slow each other.
_COMFORTABLE_PERCENT = 100.0
_ROUNDING = 1e-6
# Two idle cards of one model differ by less: a driver or a desktop holds some memory of one of them.
_ALIKE_MB = 1024.0


def _rank(state: DeviceState) -> tuple[float, float, int, str]:
    return state.rank


class SharedDevices:
    def __init__(self, states: Iterable[DeviceState]) -> None:
        """Leave out devices that are held exclusively or of unknown size."""
        self._states = sorted((state for state in states if _is_shared(state)), key=_rank)

    def replace(self, before: DeviceState, after: DeviceState) -> None:
        """Replace a device's state. Does nothing if `before` is not in this set."""
        place = bisect.bisect_left(self._states, before.rank, key=_rank)
        if place == len(self._states) or self._states[place] is not before:
            return
        del self._states[place]
        if _is_shared(after):
            bisect.insort(self._states, after, key=_rank)

    def best(
        self, need: Need, packing: Packing, loss: Callable[[DeviceState], int] | None = None
    ) -> DeviceState | None:
        """Return the best device for a job that needs a share of one device. With a `loss`, the device with the least
        loss among those that are as full as the best."""
        least = -math.inf if need.least_mb is None else need.least_mb
        comfortable = (_COMFORTABLE_PERCENT + _ROUNDING - _load(need), math.inf, 0, "")
        slowing = bisect.bisect_right(self._states, comfortable, key=_rank)
        best: DeviceState | None = None
        for state in self._states[:slowing]:
            is_fuller = least <= state.rank[1] and (best is None or state.rank[1:] < best.rank[1:])
            if is_fuller and not check_capacity(need, state, packing):
                best = state
        if best is not None and loss is not None:
            alike = [
                each for each in as_full_as(best, self._states[:slowing]) if not check_capacity(need, each, packing)
            ]
            return min(alike, key=lambda state: (loss(state), *state.rank[1:]))
        if best is not None:
            return best
        most = math.inf if packing.max_load_percent is None or need.ignores_load else packing.max_load_percent
        most -= (need.load_percent or 0.0) - _ROUNDING
        large = (
            state
            for state in self._states[slowing:]
            if state.rank[1] >= least and (state.load_percent <= most or not state.lease_count)
        )
        return next((state for state in large if not check_capacity(need, state, packing)), None)


def as_full_as(fullest: DeviceState, states: Iterable[DeviceState]) -> list[DeviceState]:
    """Return the states that have no less free memory than the fullest, and hardly more."""
    least = math.inf if fullest.free_mb is None else fullest.free_mb
    free = ((state, math.inf if state.free_mb is None else state.free_mb) for state in states)
    return [state for state, free_mb in free if least <= free_mb <= least + _ALIKE_MB]


def placement_cost(need: Need, state: DeviceState) -> tuple[float, float, int, str]:
    """Return a sort key: how much the job would slow others there, then how much memory would be left over."""
    crowding = state.expected_percent + _load(need) - _COMFORTABLE_PERCENT if state.is_loaded else 0.0
    last = LAST_CHOICE_PERCENT if state.device.is_last_choice else 0.0
    return (
        last + (crowding if crowding > _ROUNDING else 0.0),
        state.free_mb if state.free_mb is not None else math.inf,
        state.device.index or 0,
        state.device.id,
    )


def _load(need: Need) -> float:
    return UNKNOWN_PERCENT if need.load_percent is None else need.load_percent


def _is_shared(state: DeviceState) -> bool:
    return not state.is_exclusive and state.free_mb is not None
