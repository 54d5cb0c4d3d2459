"""Choose which running jobs of lower priority leave, device by device, so that a need fits: the cheapest ones.

What counts is the time until their memory is free, and the time that they lose. Victims leave side by side: two that
hold 10 GB each are gone sooner than one that holds 20 GB.
"""

from collections.abc import Iterable, Mapping, Sequence

from gpuyard.core.lease import Need
from gpuyard.core.scheduling.device_memory import DeviceState
from gpuyard.core.scheduling.placement import PlacementState
from gpuyard.core.scheduling.world import RunningJob


def find_victims(
    need: Need, placement: PlacementState, running: Sequence[RunningJob], priority: int
) -> tuple[RunningJob, ...]:
    """Return the jobs to preempt so that the need fits. Empty where preemption would not help, or where the jobs that
    are already leaving free enough."""
    leaving = {run.lease_id for run in running if run.is_leaving and run.lease_id is not None}
    by_lease: dict[str | None, RunningJob] = {
        run.lease_id: run
        for run in running
        if run.preempt_cost_s is not None and run.priority < priority
        if run.lease_id is not None and not run.is_leaving
    }
    if not by_lease or placement.host.refuses(need):
        return ()
    states = [state.without(frozenset(leaving)) for state in placement.suitable_devices(need)]
    found = {
        state.device.id: victims
        for state in states
        if (victims := _victims_on(need, placement, state, by_lease)) is not None
    }
    costs = [(_cost_s(victims), each) for each, victims in found.items()]
    cheapest = [each for _, each in placement.links.first(need, iter(sorted(costs, key=lambda cost: cost[0])))]
    if len(cheapest) < need.devices:
        return ()
    if need.is_linked or need.is_on_one_node:
        states = [state for state in states if state.device.id in cheapest]
    chosen = {run.job_id: run for each in cheapest for run in found[each]}
    return _without_useless(need, placement, states, list(chosen.values()), need.devices)


def _victims_on(
    need: Need,
    placement: PlacementState,
    state: DeviceState,
    may_leave: Mapping[str | None, RunningJob],
) -> tuple[RunningJob, ...] | None:
    """Return the best victims on the device: the cheapest of those that leave within some time, or a single one. None
    where the need never fits."""
    here = [may_leave[each.lease_id] for each in state.promises if each.lease_id in may_leave]
    here.sort(key=_rank)
    times_s = sorted({0.0, *(run.frees_in_s for run in here)})
    groups = ([run for run in here if run.frees_in_s <= limit_s] for limit_s in times_s)
    several = (_cheapest(need, placement, state, group) for group in groups)
    choices = [victims for victims in several if victims is not None]
    choices += [(run,) for run in here if _fits(need, placement, state, (run,))]
    return min(choices, key=_cost_s, default=None)


def _cheapest(
    need: Need, placement: PlacementState, state: DeviceState, here: list[RunningJob]
) -> tuple[RunningJob, ...] | None:
    """Add the cheapest job until the need fits; `here` is sorted by cost. None where it never does."""
    victims: list[RunningJob] = []
    while not _fits(need, placement, state, victims):
        if not here:
            return None
        victims.append(here.pop(0))
    return _without_useless(need, placement, [state], victims, 1)


def _cost_s(victims: Sequence[RunningJob]) -> float:
    """Return the time until all have left, and what each of them loses."""
    leave_s = max((run.frees_in_s for run in victims), default=0.0)
    side_by_side_s = sum(run.shares_s for run in victims)
    return max(leave_s, side_by_side_s) + sum(run.preempt_cost_s or 0.0 for run in victims)


def _without_useless(
    need: Need, placement: PlacementState, states: Sequence[DeviceState], victims: Sequence[RunningJob], devices: int
) -> tuple[RunningJob, ...]:
    """Drop victims that are not needed: another may free memory on several devices, or more than is missing."""
    left = list(victims)
    for victim in sorted(victims, key=_rank, reverse=True):
        fewer = [run for run in left if run is not victim]
        if sum(_fits(need, placement, state, fewer) for state in states) >= devices:
            left = fewer
    return tuple(left)


def _rank(run: RunningJob) -> tuple[float, float, int]:
    """Return the order in which jobs leave: the cheapest first, then the youngest."""
    return run.preempt_cost_s or 0.0, -run.started_at, -run.job_id


def _fits(need: Need, placement: PlacementState, state: DeviceState, victims: Iterable[RunningJob]) -> bool:
    gone = frozenset(run.lease_id for run in victims if run.lease_id is not None)
    return placement.fits(need, state.without(gone) if gone else state)
