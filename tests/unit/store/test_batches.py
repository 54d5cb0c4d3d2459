"""Batches in the store: their pace, their last start and their record."""

from msgspec.structs import replace

from gpuyard.model.job import Attempt, Outcome, OutcomeKind, Started
from gpuyard.model.job_spec import BatchPace
from gpuyard.model.lifecycle import JobState
from gpuyard.store.job_store import JobStore
from tests.unit.store import QueueDb, end_attempt

FAILED = Outcome(kind=OutcomeKind.FAILED, status=1, reason="exit status 1")
PACE = BatchPace(max_cpu_percent=85.0, max_gpu_memory_mb=8000.0, stagger_s=2.0, sample_log="/data/samples.csv")


def attempt_of(job_id: int) -> Attempt:
    return Attempt(job_id=job_id, number=1, phase=Started(at=0.0, keeper_pid=9), boot_id="b")


def test_the_record_of_a_batch_is_replaced(queue_db: QueueDb) -> None:
    assert queue_db.store.batch_state(1) is None
    queue_db.store.set_batch_state(1, "first")
    queue_db.store.set_batch_state(1, "second")
    queue_db.store.set_batch_state(7, "another")
    assert (queue_db.store.batch_state(1), queue_db.store.batch_state(7)) == ("second", "another")


def test_the_last_start_of_a_batch_counts_its_own_runs_in_any_state(queue_db: QueueDb) -> None:
    first, second, third = queue_db.add(3, is_array=True, pace=PACE)
    (other,) = queue_db.add()
    assert queue_db.store.last_start_in_batch(first) is None
    for job_id, at in ((second, 300.0), (first, 200.0), (other, 900.0)):
        queue_db.store.start_attempt(replace(attempt_of(job_id), phase=Started(at=at)))
    assert queue_db.store.last_start_in_batch(first) == 300.0
    end_attempt(queue_db.store, second, 1, FAILED, 310.0)
    queue_db.store.change_state(second, JobState.QUEUED)
    assert queue_db.store.last_start_in_batch(first) == 300.0
    assert queue_db.store.last_start_in_batch(third) is None


def test_a_dropped_attempt_may_delay_the_next_start_and_never_advances_it(queue_db: QueueDb) -> None:
    first, second = queue_db.add(2, is_array=True, pace=PACE)
    queue_db.store.start_attempt(replace(attempt_of(first), phase=Started(at=200.0)))
    queue_db.store.start_attempt(replace(attempt_of(second), phase=Started(at=300.0)))
    queue_db.store.drop_attempt(second, 1)
    assert (queue_db.store.last_start_in_batch(first) or 0.0) >= 200.0


def test_the_pace_of_a_batch_is_read_back_with_its_jobs_and_its_lane(queue_db: QueueDb) -> None:
    first, _ = queue_db.add(2, is_array=True, pace=PACE, group_limit=2)
    assert queue_db.job(first).spec.pace == PACE
    again = JobStore(queue_db.db)
    (queue,) = again.ready_queues()
    assert (queue.lane.pace, queue.lane.group, queue.lane.group_limit) == (PACE, first, 2)


def test_runs_of_two_batches_and_plain_jobs_have_separate_lanes(queue_db: QueueDb) -> None:
    queue_db.add(2, is_array=True, pace=PACE, group_limit=2)
    queue_db.add(2, is_array=True, pace=PACE, group_limit=2)
    queue_db.add(2)
    assert queue_db.ready() == [[1, 2], [3, 4], [5, 6]]
