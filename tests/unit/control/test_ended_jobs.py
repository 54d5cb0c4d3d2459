"""Ends that are stored together: what the store has afterwards, for attempts that were stored before and others."""

import pytest

from gpuyard.control.transitions import JobTransitions
from gpuyard.core.job.job import Attempt, Outcome, OutcomeKind, Started
from gpuyard.core.job.lifecycle import JobState
from tests.unit.store import QueueDb

SUCCEEDED = Outcome(kind=OutcomeKind.SUCCEEDED, status=0)
FAILED = Outcome(kind=OutcomeKind.FAILED, status=1, reason="exit status 1")
NEVER_STARTED = Outcome(kind=OutcomeKind.NEVER_STARTED)


def start(transitions: JobTransitions, job_id: int, *, is_stored: bool) -> None:
    job = transitions.store.job(job_id)
    assert job is not None
    attempt = Attempt(job_id=job_id, number=1, phase=Started(at=110.0, keeper_pid=9))
    transitions.start(job, attempt, is_stored=is_stored)


@pytest.mark.parametrize("is_stored", [True, False])
def test_ends_of_one_block_are_stored_when_it_is_over(queue_db: QueueDb, is_stored: bool) -> None:
    ids = queue_db.add(3)
    transitions = JobTransitions(queue_db.store)
    for job_id in ids:
        start(transitions, job_id, is_stored=is_stored)
    with transitions.ends.together():
        for job_id, outcome in zip(ids, (SUCCEEDED, FAILED, NEVER_STARTED), strict=True):
            transitions.end(job_id, outcome, 120.0, pid=4000 + job_id)
        assert {queue_db.job(job_id).state for job_id in ids} == {JobState.RUNNING if is_stored else JobState.QUEUED}
    states = [queue_db.job(job_id).state for job_id in ids]
    assert states == [JobState.SUCCEEDED, JobState.FAILED, JobState.QUEUED]
    assert [queue_db.job(job_id).attempts for job_id in ids] == [1, 1, 0]
    assert [queue_db.job(job_id).started_at for job_id in ids[:2]] == [110.0, 110.0]
    assert [queue_db.job(job_id).failures for job_id in ids] == [0, 1, 0]
    attempts = [queue_db.store.attempts(job_id) for job_id in ids]
    assert [[(each.outcome, each.pid) for each in found] for found in attempts] == [
        [(SUCCEEDED, 4000 + ids[0])],
        [(FAILED, 4000 + ids[1])],
        [],
    ]


def test_what_a_failed_block_left_is_not_stored_later(queue_db: QueueDb) -> None:
    first, second = queue_db.add(2)
    transitions = JobTransitions(queue_db.store)
    with transitions.in_step(), queue_db.store.transaction():
        start(transitions, first, is_stored=True)
        start(transitions, second, is_stored=True)

    def end_and_fail() -> None:
        with transitions.in_step(), queue_db.store.transaction(), transitions.ends.together():
            transitions.end(first, SUCCEEDED, 120.0)
            raise OSError

    with pytest.raises(OSError):  # noqa: PT011 - our own
        end_and_fail()
    with transitions.in_step(), queue_db.store.transaction(), transitions.ends.together():
        transitions.end(second, SUCCEEDED, 121.0)
    assert queue_db.job(first).state is JobState.RUNNING
    assert queue_db.job(second).state is JobState.SUCCEEDED
