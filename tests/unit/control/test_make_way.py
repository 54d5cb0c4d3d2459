"""First runs that joined a job make way after it ran out of memory: who may, and what is recorded. A card has 24 GB."""

import pytest
from msgspec.structs import replace

from gpuyard.control.make_way import MakeWay
from gpuyard.core.job.job import Growth, MemoryLack, OnPreempt, Outcome, OutcomeKind, SuspendedBy
from gpuyard.core.job.lifecycle import JobEvent, JobState
from gpuyard.core.job.retry import Verdict
from gpuyard.core.lease import FixedMemory, Need
from gpuyard.core.memory.out_of_memory import Shortage, ShortageKind
from gpuyard.core.scheduling.plan import Preempt
from gpuyard.core.snapshot import Device, Host, Sample, Snapshot, Vendor
from tests.unit.control.test_guard_memory import CARD, GB, RULES, Guard
from tests.unit.store import QueueDb

RAN_OUT = Outcome(kind=OutcomeKind.OUT_OF_MEMORY, status=1, reason="out of memory")
KNOWN = Need(memory=FixedMemory(6 * GB))


class Neighbours(Guard):
    """Jobs of one card, the oldest first; one of them runs out of memory at 120."""

    def __init__(self, queue_db: QueueDb, *, can_suspend: bool = True) -> None:
        super().__init__(queue_db, can_suspend=can_suspend)
        self.make_way = MakeWay(self.transitions, self.suspend_control, self.guard)

    def sample(self, at: float) -> Sample:
        device = Device(id="G0", vendor=Vendor.NVIDIA, index=0, memory_total_mb=CARD, memory_free_mb=CARD, processes=())
        return Sample(snapshot=Snapshot(taken_at=at, host=Host(memory_available_mb=200 * GB), devices=(device,)))

    def run_out(self, job_id: int) -> None:
        growth = Growth(count=1, memory_mb=20 * GB)
        verdict = Verdict(event=JobEvent.REQUEUE, text="again", growth=growth, keeps_place=True)
        with self.queue_db.store.transaction():
            self.transitions.end(job_id, RAN_OUT, 120.0, verdict=verdict)

    def would_help(self, job_id: int, lack: MemoryLack, growth: Growth | None, at: float = 120.0) -> bool:
        live = self.transitions.live[job_id]
        return self.make_way.would_help(live, lack, growth, self.sample(at), RULES, at)

    def younger(self, job_id: int, at: float = 121.0) -> set[int]:
        return set(self.make_way.younger(job_id, self.sample(at), RULES, at))

    def act(self, job_id: int, for_job: int, at: float = 121.0) -> None:
        with self.queue_db.store.transaction():
            self.make_way.act([Preempt(job_id=job_id, for_job=for_job)], self.sample(at), RULES, at)


@pytest.fixture
def neighbours(queue_db: QueueDb) -> Neighbours:
    return Neighbours(queue_db)


def test_first_runs_that_joined_the_job_later_may_make_way(neighbours: Neighbours) -> None:
    oldest, first, *later = (neighbours.start() for _ in range(4))
    known, kept = neighbours.start(need=KNOWN), neighbours.start(on_preempt=OnPreempt.NEVER)
    urgent = neighbours.start(priority=5)
    neighbours.run_out(first)
    assert neighbours.younger(first) == set(later)
    assert not neighbours.younger(oldest), "it still runs"
    assert {oldest, known, kept, urgent}.isdisjoint(neighbours.younger(first))


def test_a_job_that_came_after_the_end_does_not_make_way(neighbours: Neighbours) -> None:
    first, second = neighbours.start(), neighbours.start()
    attempt = neighbours.transitions.live[second].attempt
    neighbours.run_out(first)
    neighbours.transitions.keep_attempt(
        neighbours.transitions.live[second], replace(attempt, phase=replace(attempt.phase, at=120.5))
    )
    assert not neighbours.younger(first)


def test_no_job_makes_way_by_a_sample_that_still_shows_the_memory_of_the_first(neighbours: Neighbours) -> None:
    first, second = neighbours.start(), neighbours.start()
    neighbours.run_out(first)
    assert not neighbours.younger(first, at=119.9)
    assert neighbours.younger(first, at=120.0) == {second}


def test_the_younger_is_suspended_and_resumes_after_the_first_has_started(neighbours: Neighbours) -> None:
    first, second = neighbours.start(), neighbours.start()
    neighbours.run_out(first)
    neighbours.act(second, first)
    assert neighbours.state(second) is JobState.SUSPENDING
    assert neighbours.transitions.live[second].attempt.parked is SuspendedBy.MEMORY_GUARD
    assert neighbours.queue_db.job(second).reason == f"job {first} ran out of memory on GPU 0 and was there first"
    assert [live.job.id for live in neighbours.make_way.leaving_for(first)] == [second]
    neighbours.move_out(second, 125.0)
    (waiting,) = neighbours.suspend_control.queues(126.0)
    assert waiting.lane.made_way_for == first
    neighbours.queue_db.store.change_state(first, JobState.RUNNING)
    (waiting,) = neighbours.suspend_control.queues(127.0)
    assert waiting.lane.made_way_for is None


def test_a_job_that_could_not_be_suspended_is_not_asked_again(neighbours: Neighbours) -> None:
    first, second = neighbours.start(), neighbours.start()
    neighbours.run_out(first)
    neighbours.act(second, first)
    neighbours.move_out(second, 122.0, is_done=False)
    assert neighbours.state(second) is JobState.RUNNING
    assert not neighbours.younger(first, at=123.0)


def test_where_no_job_can_be_suspended_one_that_has_just_begun_is_queued_again(queue_db: QueueDb) -> None:
    neighbours = Neighbours(queue_db, can_suspend=False)
    first, second = neighbours.start(), neighbours.start()
    neighbours.run_out(first)
    assert neighbours.younger(first, at=161.0) == {second}
    assert not neighbours.younger(first, at=162.0), "it would lose more than a minute"
    neighbours.act(second, first)
    assert neighbours.state(second) is JobState.STOPPING
    assert "was there first, and cannot be suspended" in (queue_db.job(second).reason or "")
    assert not list(neighbours.make_way.leaving_for(first))


@pytest.mark.parametrize(
    ("growth", "where", "helps"),
    [
        (Growth(count=1, memory_mb=18 * GB), ShortageKind.DEVICE, True),
        (Growth(count=1, memory_mb=19 * GB), ShortageKind.DEVICE, False),
        (Growth(count=1, is_alone=True), ShortageKind.DEVICE, False),
        (Growth(count=1, memory_mb=18 * GB), ShortageKind.HOST, False),
        (None, ShortageKind.DEVICE, False),
    ],
    ids=["fits beside the oldest", "too large", "alone", "RAM", "hopeless"],
)
def test_the_job_keeps_its_place_only_where_that_lets_it_start(
    neighbours: Neighbours, growth: Growth | None, where: ShortageKind, helps: bool
) -> None:
    """The oldest holds 6 GB and stays."""
    _, first = neighbours.start(), neighbours.start()
    lack = MemoryLack(shortage=Shortage(where=where, says="out of memory"))
    assert not neighbours.would_help(first, lack, growth), "no job has joined it"
    neighbours.start()
    assert neighbours.would_help(first, lack, growth) is helps


def test_the_job_needs_no_neighbour_that_stays_to_have_its_card_alone(neighbours: Neighbours) -> None:
    first, _ = neighbours.start(), neighbours.start()
    lack = MemoryLack(shortage=Shortage(where=ShortageKind.DEVICE, says="out of memory"))
    assert neighbours.would_help(first, lack, Growth(count=3, is_alone=True))


def test_the_job_does_not_keep_its_place_for_a_neighbour_that_stays(queue_db: QueueDb) -> None:
    """As the head of the queue it would wait for a job that never leaves."""
    lack = MemoryLack(shortage=Shortage(where=ShortageKind.DEVICE, says="out of memory"))
    neighbours = Neighbours(queue_db, can_suspend=False)
    first, second = neighbours.start(), neighbours.start()
    assert neighbours.would_help(first, lack, Growth(count=1, memory_mb=20 * GB), at=160.0)
    assert not neighbours.would_help(first, lack, Growth(count=1, memory_mb=20 * GB), at=162.0), "it ran for a minute"
    with queue_db.store.transaction():
        neighbours.transitions.end(second, Outcome(kind=OutcomeKind.SUCCEEDED, status=0), 163.0)
    neighbours.start(on_preempt=OnPreempt.NEVER)
    assert not neighbours.would_help(first, lack, Growth(count=1, memory_mb=20 * GB), at=164.0)
