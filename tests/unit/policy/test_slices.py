"""Which starts take jobs along, and how many."""

from typing import Any

import pytest
from msgspec.structs import replace

from gpuyard.model.lease import Need
from gpuyard.policy.plan import MOST, decide, may_slice, slice_length
from gpuyard.policy.queue_order import Lane
from gpuyard.policy.world import StartCap
from tests.unit.policy.test_placement import GB, shared, ticket
from tests.unit.policy.test_planner import CPU, PAUSED, queue, view

FIRST = range(1, 9)


def may(*others: Any, need: Need | None = None, changes: dict[str, Any] | None = None, **facts: Any) -> bool:
    """Return whether starts of the first lane take jobs along beside other lanes."""
    waiting = queue(1, need or shared(20 * GB), *FIRST, **(changes or {}))
    lane, world = waiting.lane, view(waiting, *others, **facts)
    return may_slice(lane, decide(world), world)


def test_a_lane_may_where_only_free_places_decide() -> None:
    assert may()
    assert may(need=CPU, cpu_jobs=2), "a lane that waits alone may"
    # A lane without a lease holds up no other program.
    assert may(need=CPU, cpu_jobs=2, tickets=(ticket(shared(20 * GB), priority=1),))
    assert not may(closed_reasons=(PAUSED,))
    assert not may(start_caps=(StartCap(most=1, reason=PAUSED),)), "not while more than free places decides what starts"


@pytest.mark.parametrize(("priority", "allowed"), [(-1, True), (0, False), (1, False)])
def test_not_while_another_lane_waits_with_an_equal_or_higher_claim(priority: int, allowed: bool) -> None:
    other = queue(2, shared(20 * GB), *range(11, 19), priority=priority, user="you")
    assert may(other) is allowed


@pytest.mark.parametrize(("priority", "allowed"), [(-1, True), (0, True), (1, False)])
def test_not_while_a_program_of_higher_priority_waits_in_the_ledger(priority: int, allowed: bool) -> None:
    """Others have their turn after half a second."""
    assert may(tickets=(ticket(shared(20 * GB), priority=priority),)) is allowed


@pytest.mark.parametrize("limit", ["max_cpu_percent", "min_host_memory_mb", "max_utilization_percent", "max_power_w"])
def test_not_jobs_that_start_by_the_load_of_the_machine(limit: str) -> None:
    assert not may(need=replace(shared(20 * GB), **{limit: 50.0}))


@pytest.mark.parametrize(
    "changes", [{"stagger_s": 1.0}, {"preempts": True}, {"writes_files": True}, {"engine": "slurm"}, {"resumes": True}]
)
def test_not_in_a_lane_whose_jobs_start_one_by_one(changes: dict[str, Any]) -> None:
    lane = Lane(id=1, priority=0, user="me", tag="", need=CPU, **changes)
    world = view()
    assert not may_slice(lane, decide(world), world)


@pytest.mark.parametrize(
    ("likely_s", "waiting", "places", "length"),
    [
        (None, 100, 1, 0), (0.3, 100, 1, 0), (0.25, 100, 1, 1), (0.1, 100, 1, 4), (0.001, 1000, 2, MOST),
        (0.0, 1000, 2, MOST), (0.001, 20, 2, 10), (0.001, 1, 2, 0),
    ],
)  # fmt: skip
def test_a_slice_lasts_half_a_second(likely_s: float | None, waiting: int, places: int, length: int) -> None:
    assert slice_length(likely_s, waiting, places) == length
