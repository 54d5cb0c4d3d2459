"""Who makes room for an urgent job: the cheapest set of running jobs of lower priority, device by device."""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from gpuyard.core.lease import Need
from gpuyard.core.scheduling.device_memory import DeviceRoom
from gpuyard.core.scheduling.placement import PlacementState


class RunningJob(Struct, frozen=True, kw_only=True):
    """A live attempt. `leave_cost_s` is what it would cost to have it make room, `None` where it may not be asked; one
    that `is_leaving` is about to; runs of a batch and what runs elsewhere take no slot; it is `on` these devices."""

    job_id: int
    user: str
    tag: str
    devices: int
    started_at: float
    group: int | None = None
    lease_id: str | None = None
    priority: int = 0
    leave_cost_s: float | None = None
    is_leaving: bool = False
    takes_slot: bool = True
    on: tuple[str, ...] = ()


def find_victims(
    need: Need, board: PlacementState, running: Sequence[RunningJob], priority: int
) -> tuple[RunningJob, ...]:
    """Those whose leaving lets the job start; nobody where that would not help, or where enough leave already."""
    leaving = {run.lease_id for run in running if run.is_leaving and run.lease_id is not None}
    may_leave = {
        run.lease_id: run
        for run in running
        if run.lease_id is not None and run.leave_cost_s is not None and run.priority < priority and not run.is_leaving
    }
    if board.host_refuses(need):
        return ()
    rooms = [room.without(frozenset(leaving)) for room in board.could_do(need)]
    found = [victims for room in rooms if (victims := _victims_on(need, board, room, may_leave)) is not None]
    if len(found) < need.devices:
        return ()
    cheapest = sorted(found, key=_cost)[: need.devices]
    chosen = {run.job_id: run for victims in cheapest for run in victims}
    return _needed(need, board, rooms, list(chosen.values()), need.devices)


def _victims_on(
    need: Need, board: PlacementState, room: DeviceRoom, may_leave: dict[str, RunningJob]
) -> tuple[RunningJob, ...] | None:
    """The cheapest first, until there is room."""
    here = [may_leave[each.lease_id] for each in room.promises if each.lease_id in may_leave]
    here.sort(key=lambda run: (run.leave_cost_s or 0.0, -run.started_at))
    victims: list[RunningJob] = []
    while not _fits(need, board, room, victims):
        if not here:
            return None
        victims.append(here.pop(0))
    return _needed(need, board, [room], victims, 1)


def _needed(
    need: Need, board: PlacementState, rooms: Sequence[DeviceRoom], victims: Sequence[RunningJob], devices: int
) -> tuple[RunningJob, ...]:
    """Without those whose leaving is of no use: one may have made room on several devices, or more than was missing."""
    left = list(victims)
    for victim in sorted(victims, key=lambda run: -(run.leave_cost_s or 0.0)):
        fewer = [run for run in left if run is not victim]
        if sum(_fits(need, board, room, fewer) for room in rooms) >= devices:
            left = fewer
    return tuple(left)


def _fits(need: Need, board: PlacementState, room: DeviceRoom, victims: Iterable[RunningJob]) -> bool:
    gone = frozenset(run.lease_id for run in victims if run.lease_id is not None)
    return board.could_hold(need, room.without(gone) if gone else room)


def _cost(victims: Iterable[RunningJob]) -> float:
    return sum(run.leave_cost_s or 0.0 for run in victims)
