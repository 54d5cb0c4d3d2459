"""Whether a job may start in the place of a running one at its end: all that a plan would look at then counts."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from gpuyard.core.lease import HostShare, Lease, Need
from gpuyard.core.scheduling.closed_devices import closed_devices
from gpuyard.core.scheduling.foreign_load import ForeignLoad
from gpuyard.core.scheduling.next_in_place import NextJob, refused_places, waits_for_places
from gpuyard.core.scheduling.planner import decide
from gpuyard.core.scheduling.wait_reasons import PLACES_TAKEN, Reason, ReasonKind
from gpuyard.core.scheduling.world import RunningJob, World
from gpuyard.core.snapshot import Device, Host
from tests.unit.core.scheduling.test_placement import GB, card, lease, machine, shared
from tests.unit.core.scheduling.test_planner import CPU, PAUSED, queue, running, view
from tests.unit.core.scheduling.test_power_limit import power

NEXT = 10


def on_gpu(job_id: int, need: Need, index: int = 0) -> tuple[RunningJob, Lease]:
    run = replace(running(job_id), device_ids=(f"G{index}",), lease_id=f"L{job_id}")
    memory_mb = None if need.is_exclusive else need.reserved_mb
    return run, replace(lease(f"L{job_id}", f"G{index}", memory_mb=memory_mb), host=need.host)


def refused(seen: World, need: Need) -> list[int]:
    """Return the jobs in whose places the next job may not start, which the plan of this moment does not start."""
    assert decide(seen).starts == ()
    [first] = seen.lanes
    job = NextJob(job_id=NEXT, lane=first.lane, need=need, facts=seen.facts_of(first.jobs[0]))
    return [run.job_id for run in refused_places(seen, job, seen.running)]


def beside(
    need: Need, *places: tuple[RunningJob, Lease], devices: Sequence[Device] = (card(0),), **changes: Any
) -> World:
    """Return the view of one lane behind these jobs. `placement` are fields of the placement's view."""
    runs, leases = [run for run, _ in places], [each for _, each in places]
    lane, placement = changes.pop("lane", {}), changes.pop("placement", {})
    seen = view(queue(NEXT, need, **lane), on=machine(*devices), leases=leases, running=runs, **changes)
    return replace(seen, machine=replace(seen.machine, **placement))


@pytest.mark.parametrize("need", [Need(), shared(16 * GB)])
def test_a_job_may_start_in_the_place_of_one_like_it(need: Need) -> None:
    assert refused(beside(need, on_gpu(1, need)), need) == []


@pytest.mark.parametrize("need", [Need(), shared(9 * GB)])
def test_memory_of_processes_outside_gpuyard_counts(need: Need) -> None:
    devices, places = (card(0, used=20 * GB), card(1, used=2 * GB)), (on_gpu(1, need), on_gpu(2, need, 1))
    measured = {("L1", "G0"): GB, ("L2", "G1"): 2 * GB}
    beside_it = () if need.is_exclusive else (on_gpu(3, need, 1),)
    assert refused(beside(need, *places, *beside_it, devices=devices, measured=measured), need) == [1]


def test_foreign_load_counts_although_the_lease_hides_it() -> None:
    foreign = {"G0": ForeignLoad(is_over=True)}
    assert refused(beside(Need(), on_gpu(1, Need()), placement={"foreign": foreign}), Need()) == [1]


@pytest.mark.parametrize("limit", ["cpu_jobs", "tags", "group_limit"])
def test_a_limit_that_was_lowered_below_what_runs_counts(limit: str) -> None:
    runs = [replace(running(job_id, "t", 0, group=7), device_ids=()) for job_id in (1, 2)]
    for most, expected in ((2, []), (1, [1, 2])):
        changes: dict[str, Any] = {"cpu_jobs": most if limit == "cpu_jobs" else 9}
        changes["tags"] = {"t": most} if limit == "tags" else {}
        lane: dict[str, Any] = {"tag": "t", "group": 7, "group_limit": most if limit == "group_limit" else None}
        assert refused(view(queue(NEXT, CPU, **lane), running=runs, **changes), CPU) == expected


def test_a_stopped_tag_and_a_pause_count() -> None:
    runs = [running(1, "t", 0)]
    seen = view(queue(NEXT, CPU, tag="t"), running=runs, cpu_jobs=1)
    assert refused(seen, CPU) == []
    assert refused(replace(seen, stopped_tags=frozenset({"t"})), CPU) == [1]
    assert refused(replace(seen, closed_reasons=(PAUSED,)), CPU) == [1]


def test_only_closed_devices_that_the_jobs_hold_count() -> None:
    devices = card(0), card(1), card(2)
    closed = closed_devices(machine(*devices), (), {"G1", "G2"})
    seen = beside(Need(), on_gpu(1, Need(), 0), on_gpu(2, Need(), 1), devices=devices, placement={"closed": closed})
    assert refused(seen, Need()) == [2]


def test_a_device_that_is_unhealthy_counts() -> None:
    assert refused(beside(Need(), on_gpu(1, Need()), devices=(card(0, fault="lost"),)), Need()) == [1]


def test_a_limit_of_power_that_was_lowered_counts() -> None:
    devices = [card(index, power_draw_w=20.0, power_limit_w=300.0) for index in range(2)]
    places = on_gpu(1, Need(), 0), on_gpu(2, Need(), 1)
    learned = {1: 200.0, 2: 200.0, NEXT: 200.0}
    for limit_w, expected in ((400.0, []), (350.0, [1, 2])):
        seen = beside(Need(), *places, devices=devices, **power(limit_w, learned, 1, 2))
        assert refused(seen, Need()) == expected


def test_ram_that_is_missing_counts() -> None:
    need = replace(CPU, host=HostShare(ram_mb=4 * GB))
    held = Lease(id="L1", holder=lease("a", "G0").holder, shares=(), since=0.0, host=need.host)
    run = replace(running(1, devices=0), lease_id="L1")
    for total_mb, expected in ((7 * GB, []), (5 * GB, [1])):
        on = replace(machine(card(0)), host=Host(memory_total_mb=total_mb, memory_available_mb=total_mb))
        seen = view(queue(NEXT, need), on=on, leases=[held], running=[run])
        assert refused(seen, need) == expected


def test_a_job_with_a_limit_of_the_load_of_its_device_waits_for_a_new_sample() -> None:
    need = replace(shared(16 * GB), max_utilization_percent=50.0)
    assert refused(beside(need, on_gpu(1, need)), need) == [1]


def test_only_reasons_that_running_jobs_take_the_places_let_jobs_follow() -> None:
    for kind in ReasonKind:
        assert waits_for_places([Reason(kind, "")], ()) is (kind in PLACES_TAKEN)
        assert waits_for_places([Reason(kind, "", "G0")], ("G0",)) is (kind in PLACES_TAKEN)
        assert waits_for_places([Reason(kind, "", "G0")], ("G1",))
    assert not PLACES_TAKEN & {ReasonKind.PAUSED, ReasonKind.OCCUPIED, ReasonKind.POWER_LIMIT, ReasonKind.AWAITED}
