"""The limits of sharing for a need: a job that could run only beside the longest jobs may slow them, and only the
devices that suit it count for how deep they are shared."""

import bisect
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from gpuyard.core.lease import Need
from gpuyard.core.scheduling.device_fit import Packing, kind_of
from gpuyard.core.scheduling.device_memory import DeviceState
from gpuyard.core.scheduling.sharing_gain import free_without_longest


class SharingLimits:
    """The limits of one plan. `has_longest`: whether a running job decides when all is over (`longest_job`)."""

    def __init__(self, packing: Packing, *, has_longest: bool) -> None:
        self._packing = packing
        self._protects = has_longest and packing.protects_longest
        self._packings: dict[Need, Packing] = {}
        self._counts: dict[tuple[object, ...], int] = {}
        self._elsewhere: dict[tuple[object, ...], list[float]] = {}

    def packing_for(self, need: Need, suitable: Callable[[Need], Iterable[DeviceState]]) -> Packing:
        """Return the limits for the need; the usual ones are always the same object. `suitable` returns the devices
        that the need allows."""
        if not self._protects and self._packing.depth is None:
            return self._packing
        found = self._packings.get(need)
        if found is None:
            is_limited = need.devices and not need.is_exclusive
            found = self._packings[need] = self._find(need, suitable) if is_limited else self._packing
        return found

    def _find(self, need: Need, suitable: Callable[[Need], Iterable[DeviceState]]) -> Packing:
        found, depth = self._packing, self._packing.depth
        if self._protects and not self._is_served_elsewhere(need, suitable):
            found = replace(found, protects_longest=False)
        if depth is not None and need.ignores_depth:
            return replace(found, depth=None)
        if depth is not None and (devices := self._count(need, suitable)) != depth.devices:
            found = replace(found, depth=depth.on(devices))
        return found

    def _count(self, need: Need, suitable: Callable[[Need], Iterable[DeviceState]]) -> int:
        """Return how many healthy devices suit the need."""
        kind = kind_of(need)
        if kind not in self._counts:
            self._counts[kind] = sum(state.device.healthy for state in suitable(need))
        return self._counts[kind]

    def _is_served_elsewhere(self, need: Need, suitable: Callable[[Need], Iterable[DeviceState]]) -> bool:
        """Return whether enough devices could serve the need that have none of the longest jobs."""
        kind = kind_of(need)
        free_mb = self._elsewhere.get(kind)
        if free_mb is None:
            free_mb = self._elsewhere[kind] = free_without_longest(suitable(need))
        return len(free_mb) - bisect.bisect_left(free_mb, need.least_mb or 0.0) >= need.devices
