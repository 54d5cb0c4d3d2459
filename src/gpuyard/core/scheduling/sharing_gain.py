"""How much work jobs do on a device that they share, and whether one more adds to it.

The throughput of a device is the sum over its jobs of 1 / slow-down (`core/memory/slowdown.py`): 1 is the work of one
job alone, 2.1 means that the jobs together do what would take 2.1 devices. A job joins only if the throughput rises by
the least gain that the configuration asks for. Loads and coefficients are those that were learned; a load that is not
known counts as UNKNOWN_LOAD_PERCENT, a coefficient that is not known as a part of the load.

A job that decides when all work is over (`longest_job`) is not slowed: no job joins that would make it take noticeably
longer than alone.
"""

from collections.abc import Iterable

from msgspec import Struct

from gpuyard.core.lease import Need, Share
from gpuyard.core.memory.slowdown import UNKNOWN_LOAD_PERCENT, prior_coefficient, slowdown, throughput
from gpuyard.core.scheduling.device_memory import DeviceState

# By how much the longest job may be slowed. Less is within what durations vary anyway.
NOTICEABLE = 0.03
_ROUNDING = 1e-9


class SharingForecast(Struct, frozen=True, kw_only=True):
    """The throughput of a device before and after a job joins `jobs` others."""

    jobs: int
    before: float
    after: float

    def gains(self, least: float) -> bool:
        """Return whether the throughput rises by at least this part."""
        return self.after >= self.before * (1.0 + least) - _ROUNDING


def forecast(need: Need, state: DeviceState) -> SharingForecast:
    """Return the throughput without and with the job."""
    present = [_member(each.share) for each in state.promises if not each.is_reservation]
    foreign = state.foreign.percent
    joined = [*present, (_load(need.load_percent), _coefficient(need.slowdown, need.load_percent))]
    return SharingForecast(jobs=len(present), before=throughput(present, foreign), after=throughput(joined, foreign))


def keeps_out_request_ahead(need: Need, state: DeviceState, least: float) -> bool:
    """Return whether a request that has reserved a share of the device would gain nothing there once the job has joined
    too. Otherwise jobs of small load could join for ever before it."""
    joined = [_member(each.share) for each in state.promises if not each.is_reservation]
    joined.append((_load(need.load_percent), _coefficient(need.slowdown, need.load_percent)))
    foreign = state.foreign.percent
    before = throughput(joined, foreign)
    return any(
        throughput([*joined, _member(each.share)], foreign) < before * (1.0 + least) - _ROUNDING
        for each in state.promises
        if each.is_reservation and not each.share.is_exclusive
    )


def slowed_longest(need: Need, state: DeviceState) -> tuple[str, float] | None:
    """Return the lease of the longest job that this job would slow noticeably, and by which factor; or None."""
    loads = [(each, _load(each.share.load_percent)) for each in state.promises if not each.is_reservation]
    total = sum(load for _, load in loads) + state.foreign.percent + _load(need.load_percent)
    for each, load in loads:
        if each.is_longest and each.lease_id is not None:
            share = each.share
            factor = slowdown(_coefficient(share.slowdown, share.load_percent), total - load)
            if factor > 1.0 + NOTICEABLE:
                return each.lease_id, factor
    return None


def free_without_longest(states: Iterable[DeviceState]) -> list[float]:
    """Return the memory that each device could offer that has none of the longest jobs, the least first."""
    return sorted(
        state.without().free_mb or 0.0
        for state in states
        if state.device.healthy and not state.foreign.is_over and not any(each.is_longest for each in state.promises)
    )


def _member(share: Share) -> tuple[float, float]:
    return _load(share.load_percent), _coefficient(share.slowdown, share.load_percent)


def _load(load_percent: float | None) -> float:
    return UNKNOWN_LOAD_PERCENT if load_percent is None else load_percent


def _coefficient(learned: float | None, load_percent: float | None) -> float:
    return prior_coefficient(load_percent) if learned is None else learned
