"""Events of jobs are published after the commit, and only then."""

import pytest

from gpuyard.model.job import Outcome, OutcomeKind, PublishedEvent, PublishedEventKind
from gpuyard.model.lifecycle import JobEvent, JobState
from gpuyard.queue.transitions import JobTransitions
from tests.unit.store import QueueDb, attempt_of

FAILED = Outcome(kind=OutcomeKind.FAILED, status=3, reason="status 3")


@pytest.fixture
def transitions(queue_db: QueueDb) -> JobTransitions:
    return JobTransitions(queue_db.store)


def begin(transitions: JobTransitions, queue_db: QueueDb, job_id: int) -> None:
    number = queue_db.job(job_id).attempts + 1
    transitions.start(queue_db.job(job_id), attempt_of(job_id, 110.0, number=number, devices=("G0",)))


def summary(events: list[PublishedEvent]) -> list[tuple[str, int, JobState, OutcomeKind | None]]:
    return [(each.kind, each.job.id, each.job.state, each.outcome.kind if each.outcome else None) for each in events]


def test_a_run_has_events_from_its_start_to_its_end(transitions: JobTransitions, queue_db: QueueDb) -> None:
    (job_id,) = queue_db.add()
    begin(transitions, queue_db, job_id)
    transitions.end(job_id, Outcome(kind=OutcomeKind.SUCCEEDED, status=0), 120.0)
    assert summary(transitions.take_events()) == [
        (PublishedEventKind.STARTED, job_id, JobState.RUNNING, None),
        (PublishedEventKind.ENDED, job_id, JobState.SUCCEEDED, OutcomeKind.SUCCEEDED),
        (PublishedEventKind.FINISHED, job_id, JobState.SUCCEEDED, OutcomeKind.SUCCEEDED),
    ]
    assert transitions.take_events() == []


def test_a_job_has_a_finished_event_if_it_is_not_retried(transitions: JobTransitions, queue_db: QueueDb) -> None:
    (job_id,) = queue_db.add(retries=1)
    begin(transitions, queue_db, job_id)
    transitions.end(job_id, FAILED, 120.0)
    assert [each.kind for each in transitions.take_events()] == [PublishedEventKind.STARTED, PublishedEventKind.ENDED]
    (job_id,) = queue_db.add()
    transitions.apply(queue_db.job(job_id), JobEvent.CANCEL, 120.0, "cancelled")
    assert summary(transitions.take_events()) == [(PublishedEventKind.FINISHED, job_id, JobState.CANCELLED, None)]


def test_only_events_of_a_rolled_back_transaction_are_dropped(transitions: JobTransitions, queue_db: QueueDb) -> None:
    first, second = queue_db.add(2)
    with transitions.in_step(), queue_db.store.transaction():
        transitions.apply(queue_db.job(first), JobEvent.CANCEL, 120.0, "cancelled")

    def fail() -> None:
        with transitions.in_step(), queue_db.store.transaction():
            transitions.apply(queue_db.job(second), JobEvent.CANCEL, 121.0, "cancelled")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert [each.job.id for each in transitions.take_events()] == [first]


def test_very_many_events_are_taken_in_order_some_at_a_time(transitions: JobTransitions, queue_db: QueueDb) -> None:
    for job_id in queue_db.add(1500):
        transitions.apply(queue_db.job(job_id), JobEvent.CANCEL, 120.0)
    first, second = transitions.take_events(), transitions.take_events()
    assert (len(first), len(second), transitions.take_events()) == (1000, 500, [])
    assert [each.job.id for each in (*first, *second)] == list(range(1, 1501))
