"""How many jobs share one device while others may become free: no more than its part of all jobs, unless sharing pays.

A job beside neighbours of load L (1.0 is one fully busy device) is expected to take 1 + k * L times as long as alone,
and k to be SLOWED_PART of its own load: of the forms that were tried on 1,388 measured pairs of jobs, this fits best.
The throughput of a device is the sum over its jobs of 1 / slow-down: 1 is the work of one job alone, 2.1 means that the
jobs together do what would take 2.1 devices.

Jobs never move to another device. If many of them join one device while the others become free, the work ends later
than with one job per device. One job per device takes N / M durations for N jobs on M devices, and n jobs that share a
device take n / throughput. A job joins only if that is no longer; otherwise it waits, as a free device is expected
sooner. On a single device all work has to be done there, and there is no such limit. There and elsewhere, a job joins
only if the throughput rises by the least gain that the configuration asks for (`min_gain_percent`): else many alike
jobs would all end at the very last.

What is not known counts by a quantile: load and slow-down of programs, and durations, whose spread is taken to be as
large as their mean. Waiting for a free device wrongly costs about 1 / M of a duration, joining wrongly about half of
one. So the quantile is M / (M + 2): the median on two devices, 0.8 on eight, 0.95 on forty.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

from msgspec import Struct

from gpuyard.core.lease import Need
from gpuyard.core.scheduling.device_memory import DeviceState
from gpuyard.core.scheduling.numbers import (
    ASSUMED_S,
    LOAD_SPREAD,
    MOST_PER_DEVICE,
    PART_SPREAD,
    SLOWED_PART,
    UNKNOWN_LOAD_PERCENT,
)

_ROUNDING = 1e-9

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
        return _most_durations(self.jobs, self.devices)

    def on(self, devices: int) -> "DepthLimit | None":
        """Return the limit for a job that only some of the devices suit."""
        return depth_limit(self.jobs, devices)


def depth_limit(jobs: int, devices: int) -> DepthLimit | None:
    """Return the limit for this many running and waiting jobs; None if there is no other device to wait for."""
    return DepthLimit(jobs=min(jobs, MOST_PER_DEVICE * devices), devices=devices) if devices > 1 else None


def durations_with(need: Need, state: DeviceState, limit: DepthLimit) -> float:
    """Return how many durations of a job the jobs on a device take together once this one has joined."""
    members = [*_present(state, limit.caution), _asked(need, limit.caution)]
    return _with_margin(len(members), limit.caution) / _throughput(members, state.foreign.percent)


def is_too_deep(need: Need, state: DeviceState, limit: DepthLimit) -> bool:
    return durations_with(need, state, limit) > limit.durations + _ROUNDING


def throughputs(need: Need, state: DeviceState, limit: DepthLimit | None) -> tuple[float, float]:
    """Return the throughput of the device without and with the job."""
    caution, foreign = 0.0 if limit is None else limit.caution, state.foreign.percent
    present = _present(state, caution)
    return _throughput(present, foreign), _throughput([*present, _asked(need, caution)], foreign)


def gains(need: Need, state: DeviceState, limit: DepthLimit | None, least_percent: float) -> bool:
    """Return whether the job raises the throughput of the device by at least this much."""
    before, after = throughputs(need, state, limit)
    return after >= before * (1.0 + least_percent / 100.0) - _ROUNDING


def assumed_load(measured_percent: float | None, ran_s: float) -> float:
    """Return the load of a running job: as measured so far, which counts more the longer it runs."""
    if measured_percent is None:
        return UNKNOWN_LOAD_PERCENT
    return (measured_percent * ran_s + UNKNOWN_LOAD_PERCENT * ASSUMED_S) / (ran_s + ASSUMED_S)


def _throughput(members: Sequence[Member], foreign_percent: float) -> float:
    """Return the work that the jobs do on one device, as a multiple of one job alone."""
    total = sum([load for load, _ in members]) + foreign_percent
    return sum([1.0 / (1.0 + part * max(0.0, total - load) / 100.0) for load, part in members])


def _with_margin(jobs: int, caution: float) -> float:
    return jobs + caution * math.sqrt(jobs)


@lru_cache(maxsize=1024)
def _most_durations(jobs: int, devices: int) -> float:
    return max(1.0, _with_margin(jobs, _caution(devices)) / devices)


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


def _asked(need: Need, caution: float) -> Member:
    return _member(need.load_percent, caution)


@lru_cache(maxsize=4096)
def _member(load: float | None, caution: float) -> Member:
    if load is None:
        load = min(100.0, UNKNOWN_LOAD_PERCENT + caution * LOAD_SPREAD)
    return load, min(1.0, SLOWED_PART + caution * PART_SPREAD) * min(load, 100.0) / 100.0
