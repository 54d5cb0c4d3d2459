"""Pacer: what it keeps of batches from look to look, what it notes of their waits, and what sample logs are told."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from gpuyard.control.batch_gates import BatchGates, BatchGateState, GateSample
from gpuyard.control.transitions import JobTransitions
from gpuyard.core.job.job import Attempt, Outcome, OutcomeKind, Usage
from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.job.submission import ArrayElement
from gpuyard.core.lease import Claim, Share
from gpuyard.core.sample import Sample
from gpuyard.core.scheduling.batch_pacing import BatchPace, PaceState
from gpuyard.core.scheduling.plan import Plan, Start, WaitingJob
from gpuyard.core.scheduling.wait_reasons import Reason, ReasonKind
from gpuyard.core.snapshot import Device, Host, Snapshot
from tests.unit.core.scheduling.test_placement import GB, card
from tests.unit.store import QueueDb

PACE = BatchPace(max_cpu_percent=80.0, min_free_memory_mb=2 * GB, smoothing_s=0.0, steady_s=0.0)
NOW = 1000.0
BUSY = Reason(ReasonKind.HOST_TOO_BUSY, "CPU 95% > 80%")
STAGGERED = Reason(ReasonKind.STAGGERED, "runs start 5 s apart")


class Bench:
    """A queue with one batch in it, and the pacer of a daemon, which may be followed by another."""

    def __init__(self, pace: BatchPace) -> None:
        self.queue_db = QueueDb()
        elements = [ArrayElement(values={"index": str(index)}) for index in range(4)]
        self.runs = self.queue_db.add_each(elements, is_array=True, pace=pace, group_limit=3)
        self.group = self.runs[0]
        self.restart()

    def restart(self) -> None:
        self.transitions = JobTransitions(self.queue_db.store)
        self.transitions.reload()
        self.batch_gates = BatchGates(self.transitions)

    def see(self, now: float = NOW, *, devices: tuple[Device, ...] = (), ram: Any = None, **host: Any) -> Sample:
        seen = Host(**{"cpu_percent": 10.0, "memory_available_mb": 16 * GB, **host})
        look = Sample(snapshot=Snapshot(taken_at=now, host=seen, devices=devices), ram_mb=ram or {})
        self.batch_gates.update((queue.lane for queue in self.queue_db.store.ready_queues()), look, now)
        return look

    @property
    def standing(self) -> PaceState:
        return self.batch_gates.pace_states[self.group]

    def hold(self, *reasons: Reason, now: float = NOW) -> None:
        """Its next run is held back for these reasons."""
        (lane,) = [queue.lane for queue in self.queue_db.store.ready_queues()]
        plan = Plan(waiting=(WaitingJob(job_id=99, lane=lane, need=lane.need, reasons=reasons),))
        self.batch_gates.record(plan, Sample(snapshot=Snapshot(taken_at=now, host=Host())), now)

    def launch(
        self, job_id: int, look: Sample, now: float = NOW, *shares: Share, charged_mb: float | None = None
    ) -> None:
        (lane,) = [queue.lane for queue in self.queue_db.store.ready_queues()]
        self.transitions.start(
            self.queue_db.job(job_id), Attempt(job_id=job_id, number=1, keeper_pid=9, boot_id="b", started_at=now)
        )
        start = Start(job_id=job_id, lane=lane, claim=Claim(shares=shares), charged_mb=charged_mb)
        self.batch_gates.record(Plan(starts=(start,)), look, now)

    def learn_ram(self, ram_mb: float) -> None:
        """A run that has come and gone teaches it."""
        job_id = self.runs[-1]
        self.transitions.start(
            self.queue_db.job(job_id), Attempt(job_id=job_id, number=1, keeper_pid=9, boot_id="b", started_at=NOW)
        )
        self.transitions.note_usage(job_id, Usage(ram_mb=ram_mb))
        self.transitions.end(job_id, Outcome(kind=OutcomeKind.SUCCEEDED, status=0), NOW)


@pytest.fixture
def bench_with() -> Iterator[Callable[[BatchPace], Bench]]:
    made: list[Bench] = []

    def make(pace: BatchPace) -> Bench:
        made.append(Bench(pace))
        return made[-1]

    yield make
    for bench in made:
        bench.queue_db.db.close()


@pytest.fixture
def bench(bench_with: Callable[[BatchPace], Bench]) -> Bench:
    return bench_with(PACE)


# What is kept, and for how long


def test_a_batch_is_followed_while_it_has_runs_to_start(bench: Bench) -> None:
    was_waiting = bench.batch_gates.is_waiting
    bench.see()
    assert (was_waiting, bench.batch_gates.is_waiting) == (False, True)
    for job_id in bench.runs:
        bench.queue_db.finish(job_id, NOW)
    bench.see(NOW + 1)
    assert not bench.batch_gates.is_waiting
    assert bench.batch_gates.held_by(bench.group) is None


def test_jobs_without_a_pace_are_not_followed() -> None:
    queue_db = QueueDb()
    queue_db.add(3, is_array=True)
    pacer = BatchGates(JobTransitions(queue_db.store))
    pacer.update(
        (queue.lane for queue in queue_db.store.ready_queues()),
        Sample(snapshot=Snapshot(taken_at=1.0, host=Host())),
        1.0,
    )
    assert not pacer.is_waiting
    queue_db.db.close()


def test_one_look_counts_once_however_many_steps_go_by_it(bench_with: Callable[[BatchPace], Bench]) -> None:
    bench = bench_with(replace(PACE, smoothing_s=5.0))
    bench.see(NOW)
    look = bench.see(NOW + 1, cpu_percent=90.0)
    after_one = bench.standing.cpu.judged
    bench.batch_gates.update((queue.lane for queue in bench.queue_db.store.ready_queues()), look, NOW + 3)
    assert bench.standing.cpu.judged == after_one


def test_the_last_launch_outlives_the_daemon(bench: Bench) -> None:
    bench.launch(bench.runs[0], bench.see(), NOW)
    bench.restart()
    bench.see(NOW + 1)
    assert bench.standing.launched_at == NOW
    assert bench.standing.running == 1


def test_the_last_launch_is_known_though_its_run_has_been_put_back(bench: Bench) -> None:
    bench.launch(bench.runs[0], bench.see(), NOW)
    bench.transitions.end(bench.runs[0], Outcome(kind=OutcomeKind.OUT_OF_MEMORY), NOW + 1)
    bench.queue_db.store.change_state(bench.runs[0], JobState.QUEUED)
    bench.restart()
    bench.see(NOW + 2)
    assert bench.standing.launched_at == NOW


def test_waits_and_unknown_figures_outlive_the_daemon(bench: Bench) -> None:
    bench.see(NOW, cpu_percent=None)
    bench.hold(BUSY, now=NOW)
    bench.hold(BUSY, now=NOW + 7)
    bench.restart()
    assert bench.batch_gates.saved_state(bench.group) == BatchGateState(waits_s={"cpu": 7.0}, unknown=("--max-cpu",))
    bench.see(NOW + 100)
    bench.hold(BUSY, now=NOW + 100)
    bench.hold(BUSY, now=NOW + 101)
    assert bench.batch_gates.saved_state(bench.group).waits_s == {"cpu": 8.0}


def test_what_was_noted_of_a_batch_is_there_when_its_last_run_has_started(bench: Bench) -> None:
    bench.see()
    bench.hold(BUSY)
    bench.hold(BUSY, now=NOW + 2)
    for job_id in bench.runs:
        bench.queue_db.finish(job_id, NOW + 2)
    bench.see(NOW + 2)
    bench.restart()
    assert bench.batch_gates.saved_state(bench.group).waits_s == {"cpu": 2.0}


def test_a_batch_of_which_nothing_is_known_has_waited_for_nothing(bench: Bench) -> None:
    assert bench.batch_gates.saved_state(4711) == BatchGateState()


def test_after_a_step_that_failed_all_is_made_anew_from_the_store(bench: Bench) -> None:
    bench.launch(bench.runs[0], bench.see(), NOW)
    bench.queue_db.db.execute("UPDATE jobs SET started_at = NULL")  # as if it had never been committed
    bench.batch_gates.forget()
    assert not bench.batch_gates.is_waiting
    bench.see(NOW + 1)
    assert bench.standing.launched_at is None


# What holds the next run back


@pytest.mark.parametrize(
    ("kind", "gate"),
    [
        (ReasonKind.STAGGERED, "stagger"),
        (ReasonKind.ARRAY_LIMIT, "concurrency"),
        (ReasonKind.HOST_TOO_BUSY, "cpu"),
        (ReasonKind.HOST_TOO_FULL, "memory"),
        (ReasonKind.TOO_BUSY, "gpu"),
        (ReasonKind.TOO_FULL, "gpu-memory"),
        (ReasonKind.PAUSED, "pause"),
        (ReasonKind.LEASED, "room"),
    ],
)
def test_each_reason_is_of_a_gate_and_waits_are_counted_by_it(bench: Bench, kind: ReasonKind, gate: str) -> None:
    why = Reason(kind, "so it is")
    bench.see()
    bench.hold(why)
    assert bench.batch_gates.held_by(bench.group) == (gate, why)
    bench.hold(why, now=NOW + 2.5)
    assert bench.batch_gates.saved_state(bench.group).waits_s == {gate: 2.5}


def test_of_several_reasons_the_first_is_told(bench: Bench) -> None:
    bench.see()
    bench.hold(STAGGERED, BUSY)
    assert bench.batch_gates.held_by(bench.group) == ("stagger", STAGGERED)


def test_the_time_until_the_next_look_belongs_to_the_gate_that_held_then(bench: Bench) -> None:
    bench.see()
    bench.hold(BUSY)
    bench.hold(STAGGERED, now=NOW + 2)
    bench.hold(BUSY, now=NOW + 5)
    assert bench.batch_gates.saved_state(bench.group).waits_s == {"cpu": 2.0, "stagger": 3.0}


def test_a_batch_that_nothing_holds_back_waits_for_nothing(bench: Bench) -> None:
    bench.launch(bench.runs[0], bench.see())
    bench.launch(bench.runs[1], bench.see(NOW + 5), NOW + 5)
    assert bench.batch_gates.held_by(bench.group) is None
    assert bench.batch_gates.saved_state(bench.group).waits_s == {}


def test_one_that_waits_for_the_clock_is_woken_when_its_time_has_come(bench_with: Callable[[BatchPace], Bench]) -> None:
    bench = bench_with(replace(PACE, stagger_s=5.0))
    bench.launch(bench.runs[0], bench.see())
    bench.hold(STAGGERED, now=NOW + 1)
    assert bench.batch_gates.wake_at(NOW + 1) == NOW + 5
    assert not bench.batch_gates.wants_sample(NOW + 1)


def test_one_whose_time_has_come_waits_for_nothing_but_a_look(bench: Bench) -> None:
    bench.launch(bench.runs[0], bench.see())
    bench.hold(STAGGERED)
    assert bench.batch_gates.wake_at(NOW) is None
    assert bench.batch_gates.wants_sample(NOW)
    bench.hold(BUSY)
    assert not bench.batch_gates.wants_sample(NOW)


# What is counted before it shows


def test_runs_at_work_are_counted(bench: Bench) -> None:
    look = bench.see()
    for place in range(2):
        bench.launch(bench.runs[place], look)
    bench.see(NOW + 1)
    assert bench.standing.running == 2


def test_ram_that_a_run_has_not_taken_yet_is_kept_for_it_and_for_one_more(
    bench_with: Callable[[BatchPace], Bench],
) -> None:
    bench = bench_with(replace(PACE, run_ram_mb=3 * GB))
    bench.launch(bench.runs[0], bench.see())
    bench.see(NOW + 1, memory_available_mb=10 * GB, ram={(bench.runs[0], 1): 1 * GB})
    assert bench.standing.memory.judged == (10 - 2 - 3) * GB
    bench.see(NOW + 2, memory_available_mb=8 * GB, ram={(bench.runs[0], 1): 4 * GB})
    assert bench.standing.memory.judged == (8 - 3) * GB


def test_what_a_run_takes_of_ram_is_learned_where_nobody_said_it(bench: Bench) -> None:
    bench.learn_ram(3 * GB)
    bench.launch(bench.runs[0], bench.see())
    bench.see(NOW + 1, memory_available_mb=10 * GB)
    assert bench.standing.memory.judged == (10 - 3 - 3) * GB


def test_until_that_is_learned_a_run_is_expected_to_take_what_another_of_its_batch_has_taken(bench: Bench) -> None:
    for place in range(2):
        bench.launch(bench.runs[place], bench.see())
    bench.transitions.note_usage(bench.runs[0], Usage(ram_mb=3 * GB, peaks_mb={"G0": 2 * GB}))
    ram = {(bench.runs[0], 1): 3 * GB, (bench.runs[1], 1): 1 * GB}
    bench.see(NOW + 1, memory_available_mb=12 * GB, ram=ram)
    assert bench.standing.memory.judged == (12 - 2 - 3) * GB
    assert bench.standing.run_vram_mb == 2 * GB


def test_a_run_without_devices_is_taken_to_keep_those_busy_that_its_gates_go_by(
    bench_with: Callable[[BatchPace], Bench],
) -> None:
    bench = bench_with(replace(PACE, smoothing_s=5.0, max_gpu_percent=80.0))
    cards = (card(0, utilization_percent=10.0),)
    bench.launch(bench.runs[0], bench.see(devices=cards))
    bench.see(NOW + 5, devices=cards)
    assert bench.standing.device_loads["G0"].judged == pytest.approx(10.0 + 100.0 / 2)


def test_a_run_of_which_nothing_is_known_is_taken_to_keep_a_core_busy(bench_with: Callable[[BatchPace], Bench]) -> None:
    bench = bench_with(replace(PACE, smoothing_s=5.0))
    bench.launch(bench.runs[0], bench.see(cpu_percent=10.0, cpu_count=4.0))
    bench.see(NOW + 5, cpu_percent=10.0, cpu_count=4.0)
    assert bench.standing.cpu.judged == pytest.approx(10.0 + 25.0 / 2)
    bench.see(NOW + 6, cpu_percent=10.0, cpu_count=None)
    assert bench.standing.cpu.judged == pytest.approx(10.0)


def test_a_run_that_takes_the_place_of_another_is_no_load_to_come(bench_with: Callable[[BatchPace], Bench]) -> None:
    bench = bench_with(replace(PACE, smoothing_s=5.0))
    look = bench.see(cpu_percent=10.0, cpu_count=4.0)
    bench.launch(bench.runs[0], look)
    bench.see(NOW + 60, cpu_percent=35.0, cpu_count=4.0)
    bench.transitions.end(bench.runs[0], Outcome(kind=OutcomeKind.SUCCEEDED, status=0), NOW + 61)
    look = bench.see(NOW + 61, cpu_percent=35.0, cpu_count=4.0)
    bench.launch(bench.runs[1], look, NOW + 61)
    bench.see(NOW + 62, cpu_percent=35.0, cpu_count=4.0)
    assert bench.standing.cpu.judged == pytest.approx(bench.standing.cpu.seen)
    bench.launch(bench.runs[2], look, NOW + 62)
    bench.see(NOW + 67, cpu_percent=35.0, cpu_count=4.0)
    assert bench.standing.cpu.judged == pytest.approx((bench.standing.cpu.seen or 0.0) + 25.0 / 2)


def test_runs_are_known_by_what_they_have_in_common_and_not_by_their_seeds() -> None:
    queue_db = QueueDb()
    elements = [ArrayElement(values={"seed": str(seed)}) for seed in range(2)]
    first, second = queue_db.add_each(
        elements, is_array=True, pace=PACE, group_limit=3, command=("sh", "-c", "make {seed}")
    )
    other = queue_db.add(1, command=("sh", "-c", "else"))[0]
    transitions = JobTransitions(queue_db.store)
    transitions.start(queue_db.job(first), Attempt(job_id=first, number=1, keeper_pid=9, boot_id="b", started_at=NOW))
    transitions.note_usage(first, Usage(peaks_mb={"SIM-0": 3 * GB}))
    transitions.end(first, Outcome(kind=OutcomeKind.SUCCEEDED, status=0), NOW)
    learned = transitions.estimates.predicted_mb(queue_db.job(second))
    assert learned is not None
    assert 3 * GB < learned < 4 * GB
    assert transitions.estimates.predicted_mb(queue_db.job(other)) is None
    queue_db.db.close()


def test_ram_of_another_batch_s_runs_is_counted_too(bench: Bench) -> None:
    other = bench.queue_db.add(2, is_array=True, pace=replace(PACE, run_ram_mb=5 * GB), command=("other",))
    bench.transitions.start(
        bench.queue_db.job(other[0]), Attempt(job_id=other[0], number=1, keeper_pid=9, boot_id="b", started_at=NOW)
    )
    bench.see(memory_available_mb=10 * GB)
    assert bench.standing.memory.judged == 5 * GB


# What nobody can read


def test_a_bound_that_nobody_can_keep_is_told_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for second in range(3):
            bench.see(NOW + second, cpu_percent=None)
    assert [record.message for record in caplog.records] == [
        f"batch {bench.group}: --max-cpu is not enforced, as no probe measures the value"
    ]


# The sample log


LOGGED = replace(PACE, max_gpu_percent=70.0, max_gpu_memory_mb=20 * GB, sample_log="/data/samples.csv")


def rows_of(bench: Bench) -> list[GateSample]:
    taken = bench.batch_gates.take_rows()
    assert {path for path, _ in taken} <= {"/data/samples.csv"}
    return [row for _, row in taken]


def test_a_batch_without_a_sample_log_has_no_rows(bench: Bench) -> None:
    bench.launch(bench.runs[0], bench.see())
    assert bench.batch_gates.take_rows() == []


def test_each_look_has_a_row_for_each_device_with_what_holds_the_next_run_back(
    bench_with: Callable[[BatchPace], Bench],
) -> None:
    bench = bench_with(LOGGED)
    bench.see(devices=(card(0, 5 * GB, utilization_percent=40.0), card(1)))
    look = Sample(snapshot=Snapshot(taken_at=NOW, host=Host(), devices=(card(0), card(1))))
    (lane,) = [queue.lane for queue in bench.queue_db.store.ready_queues()]
    held = Plan(waiting=(WaitingJob(job_id=1, lane=lane, need=lane.need, reasons=(BUSY,)),))
    for _ in range(2):  # a look that is gone by twice is told once
        bench.batch_gates.record(held, look, NOW)
    first, second = rows_of(bench)
    assert (first.event, first.device, second.device) == ("sample", "G0", "G1")
    assert (first.cpu_percent, first.cpu_smoothed_percent, first.memory_judged_mb) == (10.0, 10.0, 16 * GB)
    assert (first.gpu_percent, first.gpu_smoothed_percent, first.gpu_memory_used_mb) == (40.0, 40.0, 5 * GB)
    assert (first.held_by, first.job, first.running) == ("CPU 95% > 80%", None, 0)
    assert bench.batch_gates.take_rows() == []


def test_a_launch_has_a_row_for_its_device_with_the_figures_that_it_was_launched_by(
    bench_with: Callable[[BatchPace], Bench],
) -> None:
    bench = bench_with(LOGGED)
    look = bench.see(devices=(card(0), card(1, 5 * GB)))
    share = Share(device_id="G1", memory_mb=2 * GB, is_exclusive=False)
    bench.launch(bench.runs[2], look, NOW, share, charged_mb=7 * GB)
    (row,) = rows_of(bench)
    assert (row.event, row.job, row.index, row.device) == ("launch", bench.runs[2], "2", "G1")
    assert (row.gpu_memory_judged_mb, row.gpu_memory_charged_mb) == (5 * GB, 7 * GB)


def test_on_a_machine_without_devices_there_is_a_row_for_the_host(bench_with: Callable[[BatchPace], Bench]) -> None:
    bench = bench_with(LOGGED)
    bench.launch(bench.runs[0], bench.see())
    (row,) = rows_of(bench)
    assert (row.event, row.device, row.gpu_percent, row.taken_at) == ("launch", None, None, "1970-01-01T00:16:40.000Z")


def test_a_start_that_did_not_come_to_be_is_no_launch(bench_with: Callable[[BatchPace], Bench]) -> None:
    bench = bench_with(LOGGED)
    look = bench.see()
    (lane,) = [queue.lane for queue in bench.queue_db.store.ready_queues()]
    start = Start(job_id=bench.runs[0], lane=lane, claim=Claim(shares=()))
    bench.batch_gates.record(Plan(starts=(start,)), look, NOW)
    assert [row.event for row in rows_of(bench)] == ["sample"]
    assert bench.standing.launched_at is None
