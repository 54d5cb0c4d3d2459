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


def test_runs_of_batches_start_one_at_a_time() -> None:
    made = plan(batch(1, CPU, 10, 11, 12))
    assert list(started(made)) == [10], "runs of a batch start one at a time"
    (reason,) = waiting_job(made, 1).reasons
    assert (reason.kind, reason.text) == (ReasonKind.STAGGERED, "another run is starting now")
    made = plan(batch(1, CPU, 10, 11), batch(2, CPU, 12, priority=3))
    assert list(started(made)) == [12], "runs of one batch in several lanes start one at a time too"
    made = plan(batch(1, CPU, 10, 11), batch(2, CPU, 20, 21, group=20))
    assert list(started(made)) == [10], "runs of different batches start one at a time too"
    made = plan(
        batch(1, Need(), 10, 11, sizes_each=True), on=2, facts=dict.fromkeys((10, 11), JobFacts(need=shared(GB)))
    )
    assert list(started(made)) == [10], "runs of learned memory start one at a time too"


def test_no_more_run_at_once_than_the_batch_allows_and_slots_are_for_others() -> None:
    full = [running(each, devices=0, group=BATCH) for each in (5, 6)]
    made = plan(batch(1, CPU, 10, group_limit=2), running=full)
    assert not made.starts, "no more run at once than the batch allows"
    (reason,) = waiting_job(made, 1).reasons
    assert (reason.kind, reason.text) == (ReasonKind.LIMIT, "limit reached: at most 2 runs of its batch at a time")
    # A batch takes no slots of jobs without devices and needs none.
    slots_taken = [running(each, devices=0) for each in (5, 6)]
    assert list(started(plan(batch(1, CPU, 10), running=slots_taken, cpu_jobs=2))) == [10]
    of_batch = [replace(run, group=BATCH, takes_slot=False) for run in slots_taken]
    assert list(started(plan(queue(1, CPU, 30, 31), running=of_batch, cpu_jobs=2))) == [30, 31]
    made = plan(batch(1, CPU, 10, priority=1), queue(2, CPU, 30), cpu_jobs=1)
    assert list(started(made)) == [10, 30], "a run takes no slot from jobs behind it"


def test_closed_gates_hold_the_next_run_back() -> None:
    made = plan(batch(1, CPU, 10), standing=replace(SAMPLED, cpu=GateFigure(seen=95.0, judged=95.0, gate=CLOSED)))
    (reason,) = waiting_job(made, 1).reasons
    assert (reason.kind, reason.text) == (ReasonKind.HOST_TOO_BUSY, "CPU 95% > 80%")
    made = plan(batch(1, shared(GB), 10), on=2, standing=busy("G0"))
    assert started(made) == {10: ("G1",)}, "a device with a closed gate is left out"
    made = plan(batch(1, shared(GB), 10), on=2, standing=busy("G0", "G1"))
    assert not made.starts, "a run without an open device gets a reason for each"
    assert [(reason.device_id, reason.text) for reason in waiting_job(made, 1).reasons] == [
        ("G0", "GPU 91% > 70%"), ("G1", "GPU 91% > 70%"),
    ]  # fmt: skip
    wide = shared(GB, devices=2)
    assert not plan(batch(1, wide, 10), on=2, standing=busy("G0")).starts, "a run for two devices needs two open gates"
    assert started(plan(batch(1, wide, 10), on=3, standing=busy("G0"))) == {10: ("G1", "G2")}
    only = replace(shared(GB), only=("G0",))
    made = plan(batch(1, only, 10), on=2, standing=busy("G0"))
    assert kinds_of(waiting_job(made, 1)) == [ReasonKind.TOO_BUSY], "a device that the run was not to use is of no help"
    # A batch without a snapshot has no closed gates.
    assert list(started(decide(view(batch(1, shared(GB), 10))))) == [10]
    # A run that goes on after it was suspended waits for no gate.
    resumed = queue(-7, shared(GB), 7, resumes=True)
    assert list(started(plan(resumed, batch(1, CPU, 10), standing=replace(SAMPLED, launched_at=NOW)))) == [7]
    made = plan(batch(1, shared(GB, devices=3), 10), on=2, standing=busy("G0"))
    assert ReasonKind.TOO_FEW in kinds_of(waiting_job(made, 1)), "a run that needs more devices than exist says so"


def test_runs_are_charged_before_they_use_memory() -> None:
    taken = lease("a", "G0", memory_mb=6 * GB)
    assert not plan(batch(1, shared(3 * GB), 10), leases=[taken], measured={("a", "G0"): 0.0}).starts
    (start,) = plan(batch(1, shared(2 * GB), 10), leases=[taken], measured={("a", "G0"): 0.0}).starts
    assert start.charged_mb == 8 * GB, "reserved memory counts before it is used"
    (start,) = plan(batch(1, shared(9 * GB), 10)).starts
    assert start.charged_mb == 9 * GB, "the first run on a device may take more than the bound leaves one more"
    made = plan(queue(1, shared(6 * GB), 30, priority=1), batch(2, shared(3 * GB), 10))
    assert list(started(made)) == [30]
    assert kinds_of(waiting_job(made, 2)) == [ReasonKind.TOO_FULL], "starts of the same plan are charged"
    # A run goes to the device below its memory limit.
    taken = lease("a", "G0", memory_mb=6 * GB)
    assert started(plan(batch(1, shared(3 * GB), 10), on=2, leases=[taken])) == {10: ("G1",)}
    blind = machine(card(0, None, memory_total_mb=None))
    (start,) = plan(batch(1, Need(), 10), on=blind).starts
    assert start.charged_mb is None, "a device of unknown size is charged nothing"


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


def test_a_run_that_waits_for_memory_keeps_its_place_on_open_devices() -> None:
    of_batch = lease("a", "G0", memory_mb=6 * GB)
    made = plan(batch(1, shared(6 * GB), 10, priority=5), queue(2, shared(10 * GB), 30), leases=[of_batch])
    assert started(made) == {30: ("G0",)}, "a run above its own limit delays no other job"
    taken = lease("a", "G0", memory_mb=20 * GB, holder=ALICE)
    free = replace(PACE, max_gpu_memory_mb=None)
    made = plan(batch(1, shared(6 * GB), 10, priority=5, pace=free), queue(2, shared(2 * GB), 30), leases=[taken])
    assert not made.starts
    assert made.head is not None
    assert made.head.job_id == 10, "a run that waits for memory keeps its place in the queue"
    free = replace(PACE, max_gpu_memory_mb=None)
    first = batch(1, Need(), 10, priority=5, pace=free)
    made = plan(first, queue(2, Need(), 30), on=2, leases=[lease("a", "G1")], standing=busy("G0"))
    assert started(made) == {30: ("G0",)}, "a run that waits for memory reserves only devices with open gates"


@pytest.mark.parametrize(
    ("only", "banned", "waits"),
    [(None, (), True), (("G1",), (), True), (None, ("G0",), True), (("G0",), (), False), (None, ("G1",), False)],
)
def test_a_run_without_devices_waits_for_watched_ones_only(
    only: tuple[str, ...] | None, banned: tuple[str, ...], waits: bool
) -> None:
    made = plan(batch(1, Need(devices=0, only=only, banned=banned), 10), standing=busy("G1"))
    found = [(reason.kind, reason.device_id) for job in made.waiting for reason in job.reasons]
    assert found == ([(ReasonKind.TOO_BUSY, "G1")] if waits else [])
    assert list(started(made)) == ([] if waits else [10])


def test_a_run_without_devices_waits_for_memory_of_watched_devices_too() -> None:
    full = replace(
        SAMPLED,
        device_loads={"G0": GateFigure()},
        device_memory={"G0": GateFigure(seen=9 * GB, judged=9 * GB, gate=CLOSED)},
    )
    (reason,) = waiting_job(plan(batch(1, CPU, 10), standing=full), 1).reasons
    assert (reason.kind, reason.device_id) == (ReasonKind.TOO_FULL, "G0")


STAGGERED = {"stagger_s": 5.0, "group": 10}


def test_one_job_of_the_array_starts_and_the_next_waits_for_its_turn() -> None:
    made = decide(view(queue(1, shared(GB), 10, 11, **STAGGERED), queue(2, shared(GB), 20, 21), on=2))
    assert sorted(started(made)) == [10, 20, 21]
    (reason,) = waiting_job(made, 1).reasons
    assert (reason.kind, reason.text) == (
        ReasonKind.STAGGERED, "jobs of its array start 5 s apart, the next one in 5.0 s",
    )  # fmt: skip


def test_the_last_start_counts_across_plans_unless_it_is_in_the_future() -> None:
    staggered = queue(1, shared(GB), 10, 11, **STAGGERED)
    early = decide(view(staggered, on=2, array_starts={10: NOW - 2.0}))
    assert started(early) == {}
    assert "the next one in 3.0 s" in waiting_job(early, 1).reasons[0].text
    in_time = decide(view(queue(1, shared(GB), 10, 11, **STAGGERED), on=2, array_starts={10: NOW - 5.0}))
    assert list(started(in_time)) == [10], "the last start counts across plans"
    made = decide(view(queue(1, shared(GB), 10, **STAGGERED), on=1, array_starts={10: NOW + 3600.0}))
    assert list(started(made)) == [10], "a last start in the future is ignored"
