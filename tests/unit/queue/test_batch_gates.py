"""Gates of batches: what is kept from sample to sample, the recorded waits, and the sample log."""

import logging
from typing import Any

import pytest
from msgspec.structs import replace

from gpuyard.model.job import Outcome, OutcomeKind, Usage
from gpuyard.model.job_spec import BatchPace
from gpuyard.model.lease import Claim, Share
from gpuyard.model.lifecycle import JobState
from gpuyard.model.machine_snapshot import Device, Host, Sample, Snapshot
from gpuyard.model.placeholders import ArrayElement
from gpuyard.policy.batch_pacing import PaceState
from gpuyard.policy.queue_order import Lane
from gpuyard.policy.wait_reasons import Reason, ReasonKind
from gpuyard.policy.world import Plan, Start, WaitingJob
from gpuyard.queue.batch_gates import BatchGates, BatchGateState
from gpuyard.queue.transitions import JobTransitions
from tests.unit.policy.test_placement import GB, card
from tests.unit.store import QueueDb, attempt_of

PACE = BatchPace(max_cpu_percent=80.0, min_free_memory_mb=2 * GB, smoothing_s=0.0, steady_s=0.0)
NOW = 1000.0
BUSY = Reason(ReasonKind.HOST_TOO_BUSY, "CPU 95% > 80%")
STAGGERED = Reason(ReasonKind.STAGGERED, "runs start 5 s apart")


class Bench:
    """A queue with one batch, and the batch gates of a daemon that can be restarted."""

    def __init__(self, queue_db: QueueDb, **pace: Any) -> None:
        self.queue_db = queue_db
        elements = [ArrayElement(values={"index": str(index)}) for index in range(4)]
        self.runs = self.queue_db.add_each(elements, is_array=True, pace=replace(PACE, **pace), group_limit=3)
        self.group = self.runs[0]
        self.restart()

    def restart(self) -> None:
        self.transitions = JobTransitions(self.queue_db.store)
        self.transitions.reload()
        self.batch_gates = BatchGates(self.transitions)

    def add_sample(self, now: float = NOW, *, devices: tuple[Device, ...] = (), ram: Any = None, **host: Any) -> Sample:
        seen = Host(**{"cpu_percent": 10.0, "memory_available_mb": 16 * GB, **host})
        sample = Sample(snapshot=Snapshot(taken_at=now, host=seen, devices=devices), ram_mb=ram or {})
        self.batch_gates.update(self.lanes, sample, now)
        return sample

    @property
    def lanes(self) -> list[Lane]:
        return [queue.lane for queue in self.queue_db.store.ready_queues()]

    @property
    def state(self) -> PaceState:
        return self.batch_gates.pace_states[self.group]

    def hold(self, *reasons: Reason, now: float = NOW) -> None:
        """Hold the next run back for these reasons."""
        (lane,) = self.lanes
        plan = Plan(waiting=(WaitingJob(job_id=99, lane=lane, need=lane.need, reasons=reasons),))
        self.batch_gates.record(plan, Sample(snapshot=Snapshot(taken_at=now, host=Host())), now)

    def launch(
        self, job_id: int, sample: Sample, now: float = NOW, *shares: Share, charged_mb: float | None = None
    ) -> None:
        (lane,) = self.lanes
        self.transitions.start(self.queue_db.job(job_id), attempt_of(job_id, now))
        start = Start(job_id=job_id, lane=lane, claim=Claim(shares=shares), charged_mb=charged_mb)
        self.batch_gates.record(Plan(starts=(start,)), sample, now)

    def learn_ram(self, ram_mb: float) -> None:
        """Run and end a run that held this much RAM, so that there is an estimate."""
        job_id = self.runs[-1]
        self.transitions.start(self.queue_db.job(job_id), attempt_of(job_id, NOW))
        self.transitions.note_usage(job_id, Usage(ram_mb=ram_mb))
        self.transitions.end(job_id, Outcome(kind=OutcomeKind.SUCCEEDED, status=0), NOW)


@pytest.fixture
def bench(queue_db: QueueDb) -> Bench:
    return Bench(queue_db)


def test_a_batch_is_followed_while_it_has_runs_to_start(bench: Bench) -> None:
    was_waiting = bench.batch_gates.is_waiting
    bench.add_sample()
    assert (was_waiting, bench.batch_gates.is_waiting) == (False, True)
    for job_id in bench.runs:
        bench.queue_db.finish(job_id, NOW)
    bench.add_sample(NOW + 1)
    assert not bench.batch_gates.is_waiting
    assert bench.batch_gates.held_by(bench.group) is None


def test_jobs_without_a_pace_are_not_followed(queue_db: QueueDb) -> None:
    queue_db.add(3, is_array=True)
    gates = BatchGates(JobTransitions(queue_db.store))
    gates.update(
        (queue.lane for queue in queue_db.store.ready_queues()),
        Sample(snapshot=Snapshot(taken_at=1.0, host=Host())),
        1.0,
    )
    assert not gates.is_waiting


def test_a_sample_counts_once_even_if_several_steps_use_it(queue_db: QueueDb) -> None:
    bench = Bench(queue_db, smoothing_s=5.0)
    bench.add_sample(NOW)
    sample = bench.add_sample(NOW + 1, cpu_percent=90.0)
    after_one = bench.state.cpu.judged
    bench.batch_gates.update(bench.lanes, sample, NOW + 3)
    assert bench.state.cpu.judged == after_one


def test_the_last_launch_outlives_the_daemon(bench: Bench) -> None:
    bench.launch(bench.runs[0], bench.add_sample(), NOW)
    bench.restart()
    bench.add_sample(NOW + 1)
    assert bench.state.launched_at == NOW
    assert bench.state.running == 1


def test_the_last_launch_is_known_after_its_run_was_requeued(bench: Bench) -> None:
    bench.launch(bench.runs[0], bench.add_sample(), NOW)
    bench.transitions.end(bench.runs[0], Outcome(kind=OutcomeKind.OUT_OF_MEMORY), NOW + 1)
    bench.queue_db.store.change_state(bench.runs[0], JobState.QUEUED)
    bench.restart()
    bench.add_sample(NOW + 2)
    assert bench.state.launched_at == NOW


def test_waits_and_unknown_figures_outlive_the_daemon(bench: Bench) -> None:
    bench.add_sample(NOW, cpu_percent=None)
    bench.hold(BUSY, now=NOW)
    bench.hold(BUSY, now=NOW + 7)
    bench.restart()
    assert bench.batch_gates.saved_state(bench.group) == BatchGateState(waits_s={"cpu": 7.0}, unknown=("--max-cpu",))
    bench.add_sample(NOW + 100)
    bench.hold(BUSY, now=NOW + 100)
    bench.hold(BUSY, now=NOW + 101)
    assert bench.batch_gates.saved_state(bench.group).waits_s == {"cpu": 8.0}
    assert bench.batch_gates.saved_state(4711) == BatchGateState()


def test_the_saved_state_of_a_batch_survives_the_start_of_its_last_run(bench: Bench) -> None:
    bench.add_sample()
    bench.hold(BUSY)
    bench.hold(BUSY, now=NOW + 2)
    for job_id in bench.runs:
        bench.queue_db.finish(job_id, NOW + 2)
    bench.add_sample(NOW + 2)
    bench.restart()
    assert bench.batch_gates.saved_state(bench.group).waits_s == {"cpu": 2.0}


def test_after_a_failed_step_all_state_is_read_from_the_store_again(bench: Bench) -> None:
    bench.launch(bench.runs[0], bench.add_sample(), NOW)
    bench.queue_db.db.execute("UPDATE jobs SET started_at = NULL")  # as if it had never been committed
    bench.batch_gates.forget()
    assert not bench.batch_gates.is_waiting
    bench.add_sample(NOW + 1)
    assert bench.state.launched_at is None


@pytest.mark.parametrize(
    ("kind", "gate"),
    [
        (ReasonKind.STAGGERED, "stagger"), (ReasonKind.LIMIT, "concurrency"), (ReasonKind.HOST_TOO_BUSY, "cpu"),
        (ReasonKind.HOST_TOO_FULL, "memory"), (ReasonKind.TOO_BUSY, "gpu"), (ReasonKind.TOO_FULL, "gpu-memory"),
        (ReasonKind.PAUSED, "pause"), (ReasonKind.LEASED, "room"),
    ],
)  # fmt: skip
def test_waits_are_counted_by_the_gate_of_their_reason(bench: Bench, kind: ReasonKind, gate: str) -> None:
    why = Reason(kind, "so it is")
    bench.add_sample()
    bench.hold(why)
    assert bench.batch_gates.held_by(bench.group) == (gate, why)
    bench.hold(why, now=NOW + 2.5)
    assert bench.batch_gates.saved_state(bench.group).waits_s == {gate: 2.5}


def test_the_time_until_the_next_sample_counts_for_the_first_gate_that_was_closed(bench: Bench) -> None:
    bench.add_sample()
    bench.hold(BUSY)
    bench.hold(STAGGERED, now=NOW + 2)
    bench.hold(BUSY, now=NOW + 5)
    assert bench.batch_gates.saved_state(bench.group).waits_s == {"cpu": 2.0, "stagger": 3.0}
    bench.add_sample()
    bench.hold(STAGGERED, BUSY)
    assert bench.batch_gates.held_by(bench.group) == ("stagger", STAGGERED)


def test_a_batch_with_open_gates_has_no_waits(bench: Bench) -> None:
    bench.launch(bench.runs[0], bench.add_sample())
    bench.launch(bench.runs[1], bench.add_sample(NOW + 5), NOW + 5)
    assert bench.batch_gates.held_by(bench.group) is None
    assert bench.batch_gates.saved_state(bench.group).waits_s == {}


def test_a_batch_that_waits_for_its_stagger_is_woken_when_the_stagger_is_over(queue_db: QueueDb) -> None:
    bench = Bench(queue_db, stagger_s=5.0)
    bench.launch(bench.runs[0], bench.add_sample())
    bench.hold(STAGGERED, now=NOW + 1)
    assert bench.batch_gates.wake_at(NOW + 1) == NOW + 5
    assert not bench.batch_gates.wants_sample(NOW + 1)


def test_a_batch_after_its_stagger_waits_only_for_a_new_sample(bench: Bench) -> None:
    bench.launch(bench.runs[0], bench.add_sample())
    bench.hold(STAGGERED)
    assert bench.batch_gates.wake_at(NOW) is None
    assert bench.batch_gates.wants_sample(NOW)
    bench.hold(BUSY)
    assert not bench.batch_gates.wants_sample(NOW)


def test_running_runs_are_counted(bench: Bench) -> None:
    sample = bench.add_sample()
    for place in range(2):
        bench.launch(bench.runs[place], sample)
    bench.add_sample(NOW + 1)
    assert bench.state.running == 2


def test_ram_that_a_run_has_not_taken_yet_is_reserved_for_it_and_for_the_next_run(queue_db: QueueDb) -> None:
    bench = Bench(queue_db, run_ram_mb=3 * GB)
    bench.launch(bench.runs[0], bench.add_sample())
    bench.add_sample(NOW + 1, memory_available_mb=10 * GB, ram={(bench.runs[0], 1): 1 * GB})
    assert bench.state.memory.judged == (10 - 2 - 3) * GB
    bench.add_sample(NOW + 2, memory_available_mb=8 * GB, ram={(bench.runs[0], 1): 4 * GB})
    assert bench.state.memory.judged == (8 - 3) * GB


def test_the_ram_of_a_run_is_learned_if_it_was_not_declared(bench: Bench) -> None:
    bench.learn_ram(3 * GB)
    bench.launch(bench.runs[0], bench.add_sample())
    bench.add_sample(NOW + 1, memory_available_mb=10 * GB)
    assert bench.state.memory.judged == (10 - 3 - 3) * GB


def test_before_an_estimate_a_run_is_expected_to_take_the_ram_of_another_run_of_its_batch(bench: Bench) -> None:
    for place in range(2):
        bench.launch(bench.runs[place], bench.add_sample())
    bench.transitions.note_usage(bench.runs[0], Usage(ram_mb=3 * GB, peaks_mb={"G0": 2 * GB}))
    ram = {(bench.runs[0], 1): 3 * GB, (bench.runs[1], 1): 1 * GB}
    bench.add_sample(NOW + 1, memory_available_mb=12 * GB, ram=ram)
    assert bench.state.memory.judged == (12 - 2 - 3) * GB
    assert bench.state.run_vram_mb == 2 * GB


def test_a_run_without_devices_is_expected_to_load_the_devices_of_its_gates(queue_db: QueueDb) -> None:
    bench = Bench(queue_db, smoothing_s=5.0, max_gpu_percent=80.0)
    cards = (card(0, utilization_percent=10.0),)
    bench.launch(bench.runs[0], bench.add_sample(devices=cards))
    bench.add_sample(NOW + 5, devices=cards)
    assert bench.state.device_loads["G0"].judged == pytest.approx(10.0 + 100.0 / 2)


def test_a_run_without_an_estimate_is_expected_to_use_one_core(queue_db: QueueDb) -> None:
    bench = Bench(queue_db, smoothing_s=5.0)
    bench.launch(bench.runs[0], bench.add_sample(cpu_percent=10.0, cpu_count=4.0))
    bench.add_sample(NOW + 5, cpu_percent=10.0, cpu_count=4.0)
    assert bench.state.cpu.judged == pytest.approx(10.0 + 25.0 / 2)
    bench.add_sample(NOW + 6, cpu_percent=10.0, cpu_count=None)
    assert bench.state.cpu.judged == pytest.approx(10.0)


def test_a_run_that_replaces_an_ended_run_adds_no_expected_load(queue_db: QueueDb) -> None:
    bench = Bench(queue_db, smoothing_s=5.0)
    sample = bench.add_sample(cpu_percent=10.0, cpu_count=4.0)
    bench.launch(bench.runs[0], sample)
    bench.add_sample(NOW + 60, cpu_percent=35.0, cpu_count=4.0)
    bench.transitions.end(bench.runs[0], Outcome(kind=OutcomeKind.SUCCEEDED, status=0), NOW + 61)
    sample = bench.add_sample(NOW + 61, cpu_percent=35.0, cpu_count=4.0)
    bench.launch(bench.runs[1], sample, NOW + 61)
    bench.add_sample(NOW + 62, cpu_percent=35.0, cpu_count=4.0)
    assert bench.state.cpu.judged == pytest.approx(bench.state.cpu.seen)
    bench.launch(bench.runs[2], sample, NOW + 62)
    bench.add_sample(NOW + 67, cpu_percent=35.0, cpu_count=4.0)
    assert bench.state.cpu.judged == pytest.approx((bench.state.cpu.seen or 0.0) + 25.0 / 2)


def test_estimates_of_runs_do_not_depend_on_their_seeds(queue_db: QueueDb) -> None:
    elements = [ArrayElement(values={"seed": str(seed)}) for seed in range(2)]
    first, second = queue_db.add_each(
        elements, is_array=True, pace=PACE, group_limit=3, command=("sh", "-c", "make {seed}")
    )
    other = queue_db.add(1, command=("sh", "-c", "else"))[0]
    transitions = JobTransitions(queue_db.store)
    transitions.start(queue_db.job(first), attempt_of(first, NOW))
    transitions.note_usage(first, Usage(peaks_mb={"SIM-0": 3 * GB}))
    transitions.end(first, Outcome(kind=OutcomeKind.SUCCEEDED, status=0), NOW)
    learned = transitions.estimates.predicted_mb(queue_db.job(second))
    assert learned is not None
    assert 3 * GB < learned < 4 * GB
    assert transitions.estimates.predicted_mb(queue_db.job(other)) is None


def test_the_ram_of_runs_of_another_batch_is_counted(bench: Bench) -> None:
    other = bench.queue_db.add(2, is_array=True, pace=replace(PACE, run_ram_mb=5 * GB), command=("other",))
    bench.transitions.start(bench.queue_db.job(other[0]), attempt_of(other[0], NOW))
    bench.add_sample(memory_available_mb=10 * GB)
    assert bench.state.memory.judged == 5 * GB


def test_a_bound_on_an_unreadable_figure_is_reported_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for second in range(3):
            bench.add_sample(NOW + second, cpu_percent=None)
    assert [record.message for record in caplog.records] == [
        f"batch {bench.group}: --max-cpu is not enforced: no probe measures it"
    ]


LOGGED = {"max_gpu_percent": 70.0, "max_gpu_memory_mb": 20 * GB, "sample_log": "/data/samples.csv"}


def rows_of(bench: Bench) -> list[dict[str, Any]]:
    taken = bench.batch_gates.take_rows()
    assert {path for path, _ in taken} <= {"/data/samples.csv"}
    return [row for _, row in taken]


def test_a_batch_without_a_sample_log_has_no_rows(bench: Bench) -> None:
    bench.launch(bench.runs[0], bench.add_sample())
    assert bench.batch_gates.take_rows() == []


def test_each_sample_has_a_row_per_device_with_the_reason_that_holds_the_next_run_back(queue_db: QueueDb) -> None:
    bench = Bench(queue_db, **LOGGED)
    bench.add_sample(devices=(card(0, 5 * GB, utilization_percent=40.0), card(1)))
    sample = Sample(snapshot=Snapshot(taken_at=NOW, host=Host(), devices=(card(0), card(1))))
    (lane,) = bench.lanes
    held = Plan(waiting=(WaitingJob(job_id=1, lane=lane, need=lane.need, reasons=(BUSY,)),))
    for _ in range(2):  # a sample that two steps use has one row
        bench.batch_gates.record(held, sample, NOW)
    first, second = rows_of(bench)
    assert (first["event"], first["device"], second["device"]) == ("sample", "G0", "G1")
    assert (first["cpu_percent"], first["cpu_smoothed_percent"], first["memory_judged_mb"]) == (10.0, 10.0, 16 * GB)
    assert (first["gpu_percent"], first["gpu_smoothed_percent"], first["gpu_memory_used_mb"]) == (40.0, 40.0, 5 * GB)
    assert (first["held_by"], first["job"], first["running"]) == ("CPU 95% > 80%", None, 0)
    assert bench.batch_gates.take_rows() == []


def test_a_launch_has_a_row_for_its_device_with_the_figures_of_its_sample(queue_db: QueueDb) -> None:
    bench = Bench(queue_db, **LOGGED)
    sample = bench.add_sample(devices=(card(0), card(1, 5 * GB)))
    share = Share(device_id="G1", memory_mb=2 * GB, is_exclusive=False)
    bench.launch(bench.runs[2], sample, NOW, share, charged_mb=7 * GB)
    (row,) = rows_of(bench)
    assert (row["event"], row["job"], row["index"], row["device"]) == ("launch", bench.runs[2], "2", "G1")
    assert (row["gpu_memory_judged_mb"], row["gpu_memory_charged_mb"]) == (5 * GB, 7 * GB)


def test_a_machine_without_devices_has_a_row_for_the_host(queue_db: QueueDb) -> None:
    bench = Bench(queue_db, **LOGGED)
    bench.launch(bench.runs[0], bench.add_sample())
    (row,) = rows_of(bench)
    assert (row["event"], row["device"], row["gpu_percent"], row["taken_at"]) == (
        "launch", None, None, "1970-01-01T00:16:40.000Z",
    )  # fmt: skip


def test_a_start_that_failed_is_not_a_launch(queue_db: QueueDb) -> None:
    bench = Bench(queue_db, **LOGGED)
    sample = bench.add_sample()
    (lane,) = bench.lanes
    start = Start(job_id=bench.runs[0], lane=lane, claim=Claim(shares=()))
    bench.batch_gates.record(Plan(starts=(start,)), sample, NOW)
    assert [row["event"] for row in rows_of(bench)] == ["sample"]
    assert bench.state.launched_at is None
