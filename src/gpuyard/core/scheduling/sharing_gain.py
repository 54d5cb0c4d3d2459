"""How much work jobs do on a device that they share, and whether one more adds to it.

The throughput of a device is the sum over its jobs of 1 / slow-down (`core/memory/slowdown.py`): 1 is the work of one
job alone, 2.1 means that the jobs together do what would take 2.1 devices. A job joins only if the throughput rises by
the least gain that the configuration asks for. Loads and coefficients are those that were learned; a load that is not
known counts as UNKNOWN_LOAD_PERCENT, a coefficient that is not known as a part of the load. `caution` is how many
standard deviations beyond that count (`sharing_depth`): 0 is what is expected.

A job that decides when all work is over (`longest_job`) is not slowed: no job joins that would make it take noticeably
longer than alone.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

from msgspec import Struct

from gpuyard.core.lease import Need, Share
from gpuyard.core.memory.slowdown import PRIOR_PART, UNKNOWN_LOAD_PERCENT, slowdown, throughput
from gpuyard.core.scheduling.device_memory import DeviceState

# By how much the longest job may be slowed. Less is within what durations vary anyway.
NOTICEABLE = 0.03
# Standard deviations of the load of programs, and of the part of it by which they are slowed.
_LOAD_SPREAD, _PART_SPREAD = 30.0, 0.3
# What is left of that after it was learned: most commands have run a few times only, and beside few others.
_LEARNED_SPREAD = 0.15
_ROUNDING = 1e-9

Member = tuple[float, float]  # the load of a job on a device, and its coefficient


class SharingForecast(Struct, frozen=True, kw_only=True):
    """The throughput of a device before and after a job joins `jobs` others."""

    jobs: int
    before: float
    after: float

    def gains(self, least: float) -> bool:
        """Return whether the throughput rises by at least this part."""
        return self.after >= self.before * (1.0 + least) - _ROUNDING


def forecast(need: Need, state: DeviceState, caution: float = 0.0) -> SharingForecast:
    """Return the throughput without and with the job."""
    present, foreign = present_members(state, caution), state.foreign.percent
    after = throughput([*present, asked_member(need, caution)], foreign)
    return SharingForecast(jobs=len(present), before=throughput(present, foreign), after=after)


def keeps_out_request_ahead(need: Need, state: DeviceState, least: float, caution: float = 0.0) -> bool:
    """Return whether a request that has reserved a share of the device would gain nothing there once the job has joined
    too. Otherwise jobs of small load could join for ever before it."""
    joined = [*present_members(state, caution), asked_member(need, caution)]
    foreign = state.foreign.percent
    before = throughput(joined, foreign)
    return any(
        throughput([*joined, share_member(each.share, caution)], foreign) < before * (1.0 + least) - _ROUNDING
        for each in state.promises
        if each.is_reservation and not each.share.is_exclusive
    )


def slowed_longest(need: Need, state: DeviceState) -> tuple[str, float] | None:
    """Return the lease of the longest job that this job would slow noticeably, and by which factor; or None."""
    if not any(each.is_longest for each in state.promises):
        return None
    asked, _ = asked_member(need, 0.0)
    present = [(each, *share_member(each.share, 0.0)) for each in state.promises if not each.is_reservation]
    total = sum(load for _, load, _ in present) + state.foreign.percent + asked
    for each, load, coefficient in present:
        if each.is_longest and each.lease_id is not None:
            factor = slowdown(coefficient, total - load)
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


def present_members(state: DeviceState, caution: float) -> Sequence[Member]:
    """Return the load and the coefficient of each job on a device. The state remembers them, as it never changes."""
    found = state.members.get(caution)
    if found is None:
        present = [each.share for each in state.promises if not each.is_reservation]
        found = state.members[caution] = [share_member(share, caution) for share in present]
    return found


def asked_member(need: Need, caution: float) -> Member:
    return _member(need.load_percent, need.slowdown, caution)


def share_member(share: Share, caution: float) -> Member:
    return _member(share.load_percent, share.slowdown, caution)


@lru_cache(maxsize=4096)
def _member(load: float | None, coefficient: float | None, caution: float) -> Member:
    if load is None:
        load = min(100.0, UNKNOWN_LOAD_PERCENT + caution * _LOAD_SPREAD)
    part = min(load, 100.0) / 100.0
    if coefficient is not None:
        return load, coefficient + caution * _LEARNED_SPREAD * part
    return load, min(1.0, PRIOR_PART + caution * _PART_SPREAD) * part
