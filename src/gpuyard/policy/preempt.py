"""Choose which running jobs of lower priority leave so that a need fits: the cheapest ones. And how fast memory moves
to RAM and back, as measured, which is what it costs to suspend a job.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.model.lease import Need
from gpuyard.policy.device_state import DeviceState
from gpuyard.policy.placement import PlacementState
from gpuyard.policy.world import RunningJob

# What each move takes besides its memory: the start of the helper process, and the driver's calls.
_OVERHEAD_S = 0.5


class MoveRates(Struct, frozen=True, kw_only=True):
    """MB per second. The defaults are between those of slow and fast machines (docs/internals/measurements.md)."""

    out_mb_s: float = 2500.0
    back_mb_s: float = 5000.0
    parked_out_mb_s: float = 40000.0
    parked_back_mb_s: float = 20000.0
    together_mb_s: float = 6000.0

    def out_s(self, memory_mb: float, *, is_parked: bool = False) -> float:
        """Return how long it takes until the memory of one program is free."""
        return _OVERHEAD_S + memory_mb / (self.parked_out_mb_s if is_parked else self.out_mb_s)

    def back_s(self, memory_mb: float, *, is_parked: bool = False) -> float:
        return _OVERHEAD_S + memory_mb / (self.parked_back_mb_s if is_parked else self.back_mb_s)

    def all_out_s(self, moves: Iterable[tuple[float, bool]]) -> float:
        """Return how long it takes to move several programs side by side; each is given as MB and whether it parks."""
        known = list(moves)
        by_driver = [memory_mb for memory_mb, is_parked in known if not is_parked]
        alone = [self.out_s(memory_mb, is_parked=is_parked) for memory_mb, is_parked in known]
        shared = _OVERHEAD_S + sum(by_driver) / self.together_mb_s if len(by_driver) > 1 else 0.0
        return max((*alone, shared), default=0.0)


def learn_move(
    rates: MoveRates, memory_mb: float, seconds: float, *, is_resumed: bool = False, is_parked: bool = False
) -> MoveRates:
    """Return the rates after a program was moved, out or back, while no other was."""
    found = _rate(memory_mb, seconds)
    if found is None:
        return rates
    name = f"{'parked_' if is_parked else ''}{'back' if is_resumed else 'out'}_mb_s"
    rates = replace(rates, **{name: _mean(getattr(rates, name), found)})
    return replace(rates, together_mb_s=max(rates.out_mb_s, rates.together_mb_s))


def learn_together(rates: MoveRates, memory_mb: float, seconds: float) -> MoveRates:
    """Return the rates after several programs with `memory_mb` in all were moved out side by side."""
    found = _rate(memory_mb, seconds)
    if found is None:
        return rates
    return replace(rates, together_mb_s=max(rates.out_mb_s, _mean(rates.together_mb_s, found)))


def _rate(memory_mb: float, seconds: float) -> float | None:
    """Return the rate of a move; None if it was too small to say anything."""
    if memory_mb < 1024.0 or seconds <= 0.0:
        return None
    return memory_mb / max(seconds - _OVERHEAD_S, seconds / 10)


def _mean(known: float, found: float) -> float:
    return round(known + 0.5 * (found - known), 1)


def find_victims(
    need: Need, placement: PlacementState, running: Sequence[RunningJob], priority: int
) -> tuple[RunningJob, ...]:
    """Return the jobs to preempt so that the need fits; none if that would not help, or is under way already."""
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
    need: Need, placement: PlacementState, state: DeviceState, may_leave: Mapping[str | None, RunningJob]
) -> tuple[RunningJob, ...] | None:
    """Return the best victims on the device: the cheapest that leave within some time, or a single one."""
    here = [may_leave[each.lease_id] for each in state.promises if each.lease_id in may_leave]
    here.sort(key=_rank)
    choices: list[tuple[RunningJob, ...]] = []
    for limit_s in sorted({0.0, *(run.frees_in_s for run in here)}):
        group = [run for run in here if run.frees_in_s <= limit_s]
        # The cheapest jobs, as many as it takes until the need fits.
        counts = (count for count in range(len(group) + 1) if _fits(need, placement, state, group[:count]))
        if (count := next(counts, None)) is not None:
            choices.append(_without_useless(need, placement, [state], group[:count], 1))
    choices += [(run,) for run in here if _fits(need, placement, state, (run,))]
    return min(choices, key=_cost_s, default=None)


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
