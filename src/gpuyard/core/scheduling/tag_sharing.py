"""How the jobs of one tag share devices: how many run on one device, spread evenly, and the time between two starts.

A job of unknown memory reserves an equal part of what others leave: the free memory, divided by the places that the tag
has left on the device. So as many jobs fit as the user asked for, also beside a desktop. The part is at most
1/`most_per_device` of the device, and at least half of that: where less is free, the job waits.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from gpuyard.core.job.job_spec import TagSharing
from gpuyard.core.lease import FixedMemory, Need, PartOfDevice
from gpuyard.core.scheduling.device_choice import placement_cost
from gpuyard.core.scheduling.device_memory import DeviceState
from gpuyard.core.scheduling.numbers import LEAST_PART


def spread_need(
    need: Need, sharing: TagSharing, states: Sequence[DeviceState], counts: Mapping[str, int]
) -> list[Need]:
    """Return variants of the need in the order to try them: devices with the fewest jobs of the tag first. Empty where
    too few devices are below their limit. `counts` is the number of jobs of the tag by device id."""
    free = [state for state in states if counts.get(state.device.id, 0) < sharing.most_per_device]
    places = {state.device.id: sharing.most_per_device - counts.get(state.device.id, 0) for state in free}
    need = replace(need, ignores_load=True)
    return [
        variant
        for least in sorted(set(places.values()), reverse=True)
        for variant in _sized(need, [state for state in free if places[state.device.id] >= least], places)
    ]


def merge_variants(needs: Sequence[Need]) -> Need:
    """Return one need that covers all variants, to explain what the job waits for."""
    if len(needs) == 1:
        return needs[0]
    ids = dict.fromkeys(device_id for need in needs for device_id in need.only or ())
    smallest = min(needs, key=lambda need: need.required_mb or 0.0)
    return replace(smallest, only=tuple(ids))


def _sized(need: Need, states: Sequence[DeviceState], places: Mapping[str, int]) -> Iterator[Need]:
    """Yield the need with its part of these devices. For one device: first where the job slows others least, then where
    its part is largest."""
    if len(states) < need.devices:
        return
    if not isinstance(need.memory, PartOfDevice):
        yield replace(need, only=_ids(states))
        return
    part = need.memory.part
    sizes = {state.device.id: _part_mb(state, part, places[state.device.id]) for state in states}
    if need.devices > 1:
        fitting = [size for state in states if (size := sizes[state.device.id]) <= (state.free_mb or 0.0)]
        yield replace(need, only=_ids(states), memory=FixedMemory(min(fitting or sizes.values())))
        return

    def rank(state: DeviceState) -> tuple[float, float]:
        return placement_cost(need, state)[0], -sizes[state.device.id]

    for (_, negative_size), alike in itertools.groupby(sorted(states, key=rank), key=rank):
        yield replace(need, only=_ids(alike), memory=FixedMemory(-negative_size))


def _part_mb(state: DeviceState, part: float, places: int) -> float:
    """Return whole MB, so that rounding never makes the parts exceed the free memory."""
    full = part * (state.capacity_mb or 0.0)
    equal = full if state.free_mb is None else math.floor(state.free_mb / places)
    return min(full, max(equal, full * LEAST_PART))


def _ids(states: Iterable[DeviceState]) -> tuple[str, ...]:
    return tuple(state.device.id for state in states)
