"""How many jobs share one device: what sharing gains, how long jobs take that share, and tasks of one workspace.

A job beside neighbours of load L takes 1 + k * L times as long as alone, and k is SLOWED_PART of its own load: of the
forms that were tried on 1,388 measured pairs, this fits best. What is unknown counts by a quantile: M / (M + 2).
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.model.lease import FixedMemory, Need, PartOfDevice
from gpuyard.policy import numbers
from gpuyard.policy.device_state import DeviceState
from gpuyard.policy.linked_sets import placement_cost

if TYPE_CHECKING:
    from gpuyard.model.job_spec import TagSharing

Member = tuple[float, float]  # the load of a job on a device, and its k


class DepthLimit(Struct, frozen=True, kw_only=True):
    """`jobs` run or wait for `devices`."""

    jobs: int
    devices: int

    @property
    def caution(self) -> float:
        """How many standard deviations beyond what is expected count."""
        return _caution(self.devices)

    @property
    def durations(self) -> float:
        """How many durations of a job all work takes with one job per device."""
        return max(1.0, _with_margin(self.jobs, self.caution) / self.devices)


def depth_limit(jobs: int, devices: int) -> DepthLimit | None:
    """Return the limit for this many running and waiting jobs; None if there is no other device to wait for."""
    return DepthLimit(jobs=min(jobs, numbers.MOST_PER_DEVICE * devices), devices=devices) if devices > 1 else None


def durations_with(need: Need, state: DeviceState, limit: DepthLimit) -> float:
    """Return how many durations of a job the jobs on a device take together once this one has joined."""
    members = [*_present(state, limit.caution), _member(need.load_percent, limit.caution)]
    return _with_margin(len(members), limit.caution) / _throughput(members, state.foreign.percent)


def is_too_deep(need: Need, state: DeviceState, limit: DepthLimit) -> bool:
    return durations_with(need, state, limit) > limit.durations + 1e-9


def throughputs(need: Need, state: DeviceState, limit: DepthLimit | None) -> tuple[float, float]:
    """Return the throughput of the device without and with the job."""
    caution, foreign = 0.0 if limit is None else limit.caution, state.foreign.percent
    present = _present(state, caution)
    return _throughput(present, foreign), _throughput([*present, _member(need.load_percent, caution)], foreign)


def gains(need: Need, state: DeviceState, limit: DepthLimit | None, least_percent: float) -> bool:
    """Return whether the job raises the throughput of the device by at least this much."""
    before, after = throughputs(need, state, limit)
    return after >= before * (1.0 + least_percent / 100.0) - 1e-9


def assumed_load(measured_percent: float | None, ran_s: float) -> float:
    """Return the load of a running job: as measured so far, which counts more the longer it runs."""
    if measured_percent is None:
        return numbers.UNKNOWN_LOAD_PERCENT
    return (measured_percent * ran_s + numbers.UNKNOWN_LOAD_PERCENT * numbers.ASSUMED_S) / (ran_s + numbers.ASSUMED_S)


def _throughput(members: Sequence[Member], foreign_percent: float) -> float:
    """Return the work that the jobs do on one device, as a multiple of one job alone."""
    total = sum([load for load, _ in members]) + foreign_percent
    return sum([1.0 / (1.0 + part * max(0.0, total - load) / 100.0) for load, part in members])


def _with_margin(jobs: int, caution: float) -> float:
    return jobs + caution * math.sqrt(jobs)


@lru_cache(maxsize=64)
def _caution(devices: int) -> float:
    return max(0.0, NormalDist().inv_cdf(devices / (devices + 2.0)))


def _present(state: DeviceState, caution: float) -> Sequence[Member]:
    """Return the load and k of each job on a device. The state remembers them, as it never changes."""
    found = state.members.get(caution)
    if found is None:
        present = [each.share.load_percent for each in state.promises if not each.is_reservation]
        found = state.members[caution] = [_member(load, caution) for load in present]
    return found


@lru_cache(maxsize=4096)
def _member(load: float | None, caution: float) -> Member:
    if load is None:
        load = min(100.0, numbers.UNKNOWN_LOAD_PERCENT + caution * numbers.LOAD_SPREAD)
    return load, min(1.0, numbers.SLOWED_PART + caution * numbers.PART_SPREAD) * min(load, 100.0) / 100.0


def spread_need(
    need: Need, sharing: "TagSharing", states: Sequence[DeviceState], counts: Mapping[str, int]
) -> list[Need]:
    """Return variants of the need to try in order: devices with the fewest jobs of the tag (`counts`) first."""
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
    """Yield the need with its part of these devices: first where it slows others least, then the largest part."""
    if len(states) < need.devices:
        return
    if not isinstance(need.memory, PartOfDevice):
        yield replace(need, only=_ids(states))
        return
    sizes: dict[str, float] = {}
    for state in states:
        full = need.memory.part * (state.capacity_mb or 0.0)
        # Whole MB, so that rounding never makes the parts exceed the free memory.
        equal = full if state.free_mb is None else math.floor(state.free_mb / places[state.device.id])
        sizes[state.device.id] = min(full, max(equal, full * numbers.LEAST_PART))
    if need.devices > 1:
        fitting = [size for state in states if (size := sizes[state.device.id]) <= (state.free_mb or 0.0)]
        yield replace(need, only=_ids(states), memory=FixedMemory(min(fitting or sizes.values())))
        return

    def rank(state: DeviceState) -> tuple[float, float]:
        return placement_cost(need, state)[0], -sizes[state.device.id]

    for (_, negative_size), alike in itertools.groupby(sorted(states, key=rank), key=rank):
        yield replace(need, only=_ids(alike), memory=FixedMemory(-negative_size))


def _ids(states: Iterable[DeviceState]) -> tuple[str, ...]:
    return tuple(state.device.id for state in states)
