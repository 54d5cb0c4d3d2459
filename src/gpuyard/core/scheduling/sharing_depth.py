"""How many jobs share one device while others are busy too: no more than its part of all jobs, unless sharing pays.

Jobs never move to another device. If many of them join one device while the others become free, the work ends later
than with one job per device. One job per device takes N / M durations for N jobs on M devices, and n jobs that share a
device take n / throughput (`sharing_gain`). A job joins only if that is no longer; otherwise it waits, as a free device
is expected sooner.

What is not known counts by a quantile: load and slow-down of programs that were not measured, and durations, whose
spread is taken to be as large as their mean. Waiting for a free device wrongly costs about 1 / M of a duration, joining
wrongly about half of one. So the quantile is M / (M + 2): the median on two devices, 0.8 on eight, 0.95 on forty. On a
single device all work has to be done there, and there is no limit. The gain of sharing (`sharing_gain`) counts by the
same quantile: jobs that may gain nothing from it do not pile up.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

from msgspec import Struct

from gpuyard.core.lease import Need
from gpuyard.core.memory.slowdown import throughput
from gpuyard.core.scheduling.device_memory import DeviceState
from gpuyard.core.scheduling.sharing_gain import Member, asked_member, present_members, share_member

# More jobs than this per device count as this many: no device is shared by more.
MOST_PER_DEVICE = 64
_ROUNDING = 1e-9


class DepthLimit(Struct, frozen=True, kw_only=True):
    """`jobs` run or wait for `devices`. Jobs are counted in steps, so that most plans have the same limit."""

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
    if devices < 2:
        return None
    step = max(1, devices // 8)
    return DepthLimit(jobs=min(jobs, MOST_PER_DEVICE * devices) // step * step, devices=devices)


def durations_with(need: Need, state: DeviceState, limit: DepthLimit) -> float:
    """Return how many durations of a job the jobs on a device take together once this one has joined."""
    return _durations([*present_members(state, limit.caution), asked_member(need, limit.caution)], state, limit)


def is_too_deep(need: Need, state: DeviceState, limit: DepthLimit) -> bool:
    return durations_with(need, state, limit) > limit.durations + _ROUNDING


def leaves_no_depth(need: Need, state: DeviceState, limit: DepthLimit) -> bool:
    """Return whether a request that has reserved a share of the device could no longer join once this job has."""
    caution, most = limit.caution, limit.durations + _ROUNDING
    present = present_members(state, caution)
    joined = [*present, asked_member(need, caution)]
    reserved = (each.share for each in state.promises if each.is_reservation and not each.share.is_exclusive)
    return any(
        _durations([*joined, ahead], state, limit) > most and _durations([*present, ahead], state, limit) <= most
        for ahead in (share_member(share, caution) for share in reserved)
    )


def _durations(members: Sequence[Member], state: DeviceState, limit: DepthLimit) -> float:
    return _with_margin(len(members), limit.caution) / throughput(members, state.foreign.percent)


def _with_margin(jobs: int, caution: float) -> float:
    return jobs + caution * math.sqrt(jobs)


@lru_cache(maxsize=1024)
def _most_durations(jobs: int, devices: int) -> float:
    return max(1.0, _with_margin(jobs, _caution(devices)) / devices)


@lru_cache(maxsize=64)
def _caution(devices: int) -> float:
    return max(0.0, NormalDist().inv_cdf(devices / (devices + 2.0)))
