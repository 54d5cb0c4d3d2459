"""Which devices the head of the queue has reserved while jobs run for longer than expected."""

import pytest
from msgspec.structs import replace

from gpuyard.core.lease import Need
from gpuyard.core.scheduling.planner import decide
from tests.unit.core.scheduling.test_device_choice import linked_machine
from tests.unit.core.scheduling.test_linked_sets import EIGHT
from tests.unit.core.scheduling.test_placement import GB, lease, shared
from tests.unit.core.scheduling.test_planner import NOW, queue, started, view
from tests.unit.core.scheduling.test_planner_backfill import of_lease


@pytest.mark.parametrize(
    ("expected_at", "ran_s", "then"),
    [
        (NOW + 20, 900.0, {20: ("G0",)}),  # in time
        (NOW - 20, 200.0, {20: ("G0",)}),  # overdue, and likely to take another 200 s: still the first one
        (NOW - 20, 400.0, {20: ("G2",)}),  # another 400 s: that on G0 is likely to end before
        (NOW - 20, 900.0, {20: ("G2",)}),  # another 900 s: that on G2 is expected later than that on G0
    ],
)
@pytest.mark.parametrize("need", [Need(), shared(20 * GB)])
def test_the_head_reserves_a_device_with_an_overdue_job_and_the_next_one(
    need: Need, expected_at: float, ran_s: float, then: dict[int, tuple[str, ...]]
) -> None:
    """A job that should have ended may end at any moment, or take as long again as it has run."""
    leases = [lease(name, device, memory_mb=8 * GB) for name, device in (("a", "G0"), ("b", "G1"), ("c", "G2"))]
    runs = [of_lease("a", 90), replace(of_lease("b", 91), started_at=NOW - ran_s), of_lease("c", 92)]
    about = {90: NOW + 300, 91: expected_at, 92: NOW + 500}
    queues = queue(1, need, priority=5), queue(2, shared(5 * GB), 20)
    plan = decide(view(*queues, on=3, leases=leases, running=runs, ends_about=about.get))
    assert started(plan) == then


def test_the_head_has_the_devices_that_it_needs_before_an_overdue_job_likely_ends() -> None:
    """Two of three cards are enough: the one that is overdue, and that which is expected next."""
    leases = [lease(name, device, memory_mb=8 * GB) for name, device in (("a", "G0"), ("b", "G1"), ("c", "G2"))]
    runs = [of_lease("a", 90), replace(of_lease("b", 91), started_at=NOW - 100.0), of_lease("c", 92)]
    about = {90: NOW + 300, 91: NOW - 20, 92: NOW + 500}
    queues = queue(1, Need(devices=2), priority=5), queue(2, shared(5 * GB), 20)
    plan = decide(view(*queues, on=3, leases=leases, running=runs, ends_about=about.get))
    assert started(plan) == {20: ("G2",)}


def test_no_device_of_a_linked_set_is_reserved_that_is_complete_too_late() -> None:
    """One card of each set is leased. The second set should be complete before the first one."""
    head = queue(1, Need(devices=4, is_linked=True), priority=5)
    leases = [lease("a", "G0"), lease("b", "G4")]
    running = [of_lease("a", 90), replace(of_lease("b", 91), started_at=NOW - 100.0)]
    ends = {90: NOW + 600.0, 91: NOW - 20.0}
    planned = view(head, queue(2, Need(), 20), on=8, leases=leases, running=running, ends_about=ends.get)
    plan = decide(replace(planned, placement=replace(planned.placement, snapshot=linked_machine(EIGHT))))
    assert started(plan) == {20: ("G1",)}
