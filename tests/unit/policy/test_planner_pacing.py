"""Runs of a batch: one at a time, as their gates allow, without delaying other jobs. A card has 24 GB."""

from typing import Any

import pytest
from msgspec.structs import replace

from gpuyard.model.job_spec import BatchPace
from gpuyard.model.lease import Need
from gpuyard.policy.batch_pacing import GateFigure, PaceState
from gpuyard.policy.foreign_load import SteadyGate
from gpuyard.policy.plan import decide
from gpuyard.policy.queue_order import LaneQueue
from gpuyard.policy.wait_reasons import ReasonKind
from gpuyard.policy.world import JobFacts, Plan
from tests.unit.policy.test_placement import ALICE, GB, card, lease, machine, shared
from tests.unit.policy.test_planner import CPU, NOW, kinds_of, queue, running, started, view, waiting_job

BATCH = 10
CLOSED = SteadyGate(is_closed=True)
PACE = BatchPace(max_cpu_percent=80.0, max_gpu_percent=70.0, max_gpu_memory_mb=8 * GB)
SAMPLED = PaceState(sampled_at=NOW)


def batch(lane_id: int, need: Need, *ids: int, pace: BatchPace = PACE, group: int = BATCH, **changes: Any) -> LaneQueue:
    return queue(lane_id, need, *ids, pace=pace, group=group, **{"group_limit": 6, **changes})


def plan(*queues: LaneQueue, standing: PaceState = SAMPLED, **changes: Any) -> Plan:
    return decide(view(*queues, pace_states={BATCH: standing}, **changes))


def busy(*ids: str, percent: float = 91.0) -> PaceState:
    return replace(SAMPLED, device_loads={each: GateFigure(seen=percent, judged=percent, gate=CLOSED) for each in ids})


# How many


def test_runs_of_a_batch_start_one_at_a_time() -> None:
    made = plan(batch(1, CPU, 10, 11, 12))
    assert list(started(made)) == [10]
    (reason,) = waiting_job(made, 1).reasons
    assert (reason.kind, reason.text) == (ReasonKind.STAGGERED, "another run is starting now")


def test_runs_of_one_batch_in_several_lanes_start_one_at_a_time_too() -> None:
    made = plan(batch(1, CPU, 10, 11), batch(2, CPU, 12, priority=3))
    assert list(started(made)) == [12]


def test_runs_of_different_batches_start_one_at_a_time_too() -> None:
    made = plan(batch(1, CPU, 10, 11), batch(2, CPU, 20, 21, group=20))
    assert list(started(made)) == [10]


def test_no_more_run_at_once_than_the_batch_allows() -> None:
    full = [running(each, devices=0, group=BATCH) for each in (5, 6)]
    made = plan(batch(1, CPU, 10, group_limit=2), running=full)
    assert not made.starts
    (reason,) = waiting_job(made, 1).reasons
    assert (reason.kind, reason.text) == (
        ReasonKind.LIMIT,
        "limit reached: at most 2 runs of its batch at a time",
    )


def test_a_batch_takes_no_slots_of_jobs_without_devices_and_needs_none() -> None:
    slots_taken = [running(each, devices=0) for each in (5, 6)]
    assert list(started(plan(batch(1, CPU, 10), running=slots_taken, cpu_jobs=2))) == [10]
    of_batch = [replace(run, group=BATCH, takes_slot=False) for run in slots_taken]
    assert list(started(plan(queue(1, CPU, 30, 31), running=of_batch, cpu_jobs=2))) == [30, 31]


def test_a_run_takes_no_slot_from_jobs_behind_it() -> None:
    made = plan(batch(1, CPU, 10, priority=1), queue(2, CPU, 30), cpu_jobs=1)
    assert list(started(made)) == [10, 30]


# Gates


def test_a_gate_of_the_host_holds_the_next_run_back() -> None:
    made = plan(batch(1, CPU, 10), standing=replace(SAMPLED, cpu=GateFigure(seen=95.0, judged=95.0, gate=CLOSED)))
    (reason,) = waiting_job(made, 1).reasons
    assert (reason.kind, reason.text) == (ReasonKind.HOST_TOO_BUSY, "CPU 95% > 80%")


def test_a_device_with_a_closed_gate_is_left_out() -> None:
    made = plan(batch(1, shared(GB), 10), on=2, standing=busy("G0"))
    assert started(made) == {10: ("G1",)}


def test_a_run_without_an_open_device_gets_a_reason_for_each() -> None:
    made = plan(batch(1, shared(GB), 10), on=2, standing=busy("G0", "G1"))
    assert not made.starts
    assert [(reason.device_id, reason.text) for reason in waiting_job(made, 1).reasons] == [
        ("G0", "GPU 91% > 70%"), ("G1", "GPU 91% > 70%"),
    ]  # fmt: skip


def test_a_run_for_two_devices_needs_two_open_gates() -> None:
    wide = shared(GB, devices=2)
    assert not plan(batch(1, wide, 10), on=2, standing=busy("G0")).starts
    assert started(plan(batch(1, wide, 10), on=3, standing=busy("G0"))) == {10: ("G1", "G2")}


def test_a_device_that_the_run_was_not_to_use_is_of_no_help() -> None:
    only = replace(shared(GB), only=("G0",))
    made = plan(batch(1, only, 10), on=2, standing=busy("G0"))
    assert kinds_of(waiting_job(made, 1)) == [ReasonKind.TOO_BUSY]


def test_reserved_memory_counts_before_it_is_used() -> None:
    taken = lease("a", "G0", memory_mb=6 * GB)
    assert not plan(batch(1, shared(3 * GB), 10), leases=[taken], measured={("a", "G0"): 0.0}).starts
    (start,) = plan(batch(1, shared(2 * GB), 10), leases=[taken], measured={("a", "G0"): 0.0}).starts
    assert start.charged_mb == 8 * GB


def test_the_first_run_on_a_device_may_take_more_than_the_bound_leaves_one_more() -> None:
    (start,) = plan(batch(1, shared(9 * GB), 10)).starts
    assert start.charged_mb == 9 * GB


def test_starts_of_the_same_plan_are_charged() -> None:
    made = plan(queue(1, shared(6 * GB), 30, priority=1), batch(2, shared(3 * GB), 10))
    assert list(started(made)) == [30]
    assert kinds_of(waiting_job(made, 2)) == [ReasonKind.TOO_FULL]


def test_a_run_goes_to_the_device_below_its_memory_limit() -> None:
    taken = lease("a", "G0", memory_mb=6 * GB)
    assert started(plan(batch(1, shared(3 * GB), 10), on=2, leases=[taken])) == {10: ("G1",)}


def test_a_batch_without_a_snapshot_has_no_closed_gates() -> None:
    assert list(started(decide(view(batch(1, shared(GB), 10))))) == [10]


# Other jobs are not delayed


@pytest.mark.parametrize(
    "standing",
    [
        busy("G0", "G1"),
        replace(SAMPLED, cpu=GateFigure(seen=95.0, judged=95.0, gate=CLOSED)),
        replace(SAMPLED, launched_at=NOW),
    ],
    ids=["device", "host", "stagger"],
)
def test_a_run_that_waits_for_a_gate_delays_no_other_job(standing: PaceState) -> None:
    first = batch(1, shared(20 * GB), 10, priority=5, pace=replace(PACE, max_gpu_memory_mb=None))
    made = plan(first, queue(2, Need(), 30, 31), on=2, standing=standing)
    assert started(made) == {30: ("G0",), 31: ("G1",)}
    assert made.head is None or made.head.job_id != 10


def test_a_run_above_its_own_limit_delays_no_other_job() -> None:
    of_batch = lease("a", "G0", memory_mb=6 * GB)
    made = plan(batch(1, shared(6 * GB), 10, priority=5), queue(2, shared(10 * GB), 30), leases=[of_batch])
    assert started(made) == {30: ("G0",)}


def test_a_run_that_waits_for_memory_keeps_its_place_in_the_queue() -> None:
    taken = lease("a", "G0", memory_mb=20 * GB, holder=ALICE)
    free = replace(PACE, max_gpu_memory_mb=None)
    made = plan(batch(1, shared(6 * GB), 10, priority=5, pace=free), queue(2, shared(2 * GB), 30), leases=[taken])
    assert not made.starts
    assert made.head is not None
    assert made.head.job_id == 10


def test_a_run_that_waits_for_memory_reserves_only_devices_with_open_gates() -> None:
    free = replace(PACE, max_gpu_memory_mb=None)
    first = batch(1, Need(), 10, priority=5, pace=free)
    made = plan(first, queue(2, Need(), 30), on=2, leases=[lease("a", "G1")], standing=busy("G0"))
    assert started(made) == {30: ("G0",)}


def test_a_run_that_needs_more_devices_than_exist_says_so() -> None:
    made = plan(batch(1, shared(GB, devices=3), 10), on=2, standing=busy("G0"))
    assert ReasonKind.TOO_FEW in kinds_of(waiting_job(made, 1))


# Suspended runs, and runs with needs of their own


def test_a_run_that_goes_on_after_it_was_suspended_waits_for_no_gate() -> None:
    resumed = queue(-7, shared(GB), 7, resumes=True)
    assert list(started(plan(resumed, batch(1, CPU, 10), standing=replace(SAMPLED, launched_at=NOW)))) == [7]


def test_runs_of_learned_memory_start_one_at_a_time_too() -> None:
    made = plan(
        batch(1, Need(), 10, 11, sizes_each=True), on=2, facts=dict.fromkeys((10, 11), JobFacts(need=shared(GB)))
    )
    assert list(started(made)) == [10]


def test_a_device_of_unknown_size_is_charged_nothing() -> None:
    blind = machine(card(0, None, memory_total_mb=None))
    (start,) = plan(batch(1, Need(), 10), on=blind).starts
    assert start.charged_mb is None


# Runs without devices of their own


@pytest.mark.parametrize(("only", "banned"), [(None, ()), (("G1",), ()), (None, ("G0",))])
def test_a_run_without_devices_waits_while_a_watched_device_is_over_its_limit(
    only: tuple[str, ...] | None, banned: tuple[str, ...]
) -> None:
    need = Need(devices=0, only=only, banned=banned)
    (reason,) = waiting_job(plan(batch(1, need, 10), standing=busy("G1")), 1).reasons
    assert (reason.kind, reason.device_id) == (ReasonKind.TOO_BUSY, "G1")


@pytest.mark.parametrize(("only", "banned"), [(("G0",), ()), (None, ("G1",))])
def test_a_run_without_devices_ignores_devices_that_it_does_not_watch(
    only: tuple[str, ...] | None, banned: tuple[str, ...]
) -> None:
    made = plan(batch(1, Need(devices=0, only=only, banned=banned), 10), standing=busy("G1"))
    assert list(started(made)) == [10]


def test_a_run_without_devices_waits_for_memory_of_watched_devices_too() -> None:
    full = replace(
        SAMPLED,
        device_loads={"G0": GateFigure()},
        device_memory={"G0": GateFigure(seen=9 * GB, judged=9 * GB, gate=CLOSED)},
    )
    (reason,) = waiting_job(plan(batch(1, CPU, 10), standing=full), 1).reasons
    assert (reason.kind, reason.device_id) == (ReasonKind.TOO_FULL, "G0")
