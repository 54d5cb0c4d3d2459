"""A job with very many dependants: they are settled, and revived, in several transactions, and nothing is lost between
two of them."""

from collections import deque

import pytest

from gpuyard.model.dependencies import Dependency
from gpuyard.model.lifecycle import JobEvent, JobState
from gpuyard.model.selection import parse_selection
from gpuyard.queue.transitions import JobTransitions
from tests.fakes.user_requests import requests_of
from tests.unit.store import QueueDb

MANY = 1_000


def with_dependants(queue_db: QueueDb, count: int = MANY) -> int:
    """Add a job, jobs that depend on it, and one that depends on the last of these. Return the first."""
    (first,) = queue_db.add()
    ids = queue_db.add(count, state=JobState.BLOCKED)
    (last,) = queue_db.add(state=JobState.BLOCKED)
    queue_db.store.add_pairs((each, Dependency(job_id=first)) for each in ids)
    queue_db.store.add_pairs([(last, Dependency(job_id=ids[-1]))])
    return first


def end(queue_db: QueueDb, transitions: JobTransitions, job_id: int, state: JobState) -> None:
    queue_db.finish(job_id, 200.0, state)
    with transitions.in_step(), queue_db.store.transaction():
        transitions.dependants.settle(job_id, 200.0)


def settle_all(queue_db: QueueDb, transitions: JobTransitions) -> int:
    """Return the number of transactions that it took."""
    count = 0
    while transitions.dependants.has_more:
        count += 1
        with transitions.in_step(), queue_db.store.transaction():
            transitions.dependants.settle_more(200.0)
    return count


def counts(queue_db: QueueDb) -> dict[JobState, int]:
    return {state: count for state, count in queue_db.store.counts().items() if count}


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (JobState.SUCCEEDED, {JobState.SUCCEEDED: 1, JobState.QUEUED: MANY, JobState.BLOCKED: 1}),
        (JobState.FAILED, {JobState.FAILED: 1, JobState.REJECTED: MANY + 1}),
    ],
)
def test_another_daemon_goes_on_to_settle_them(
    queue_db: QueueDb, state: JobState, expected: dict[JobState, int]
) -> None:
    first = with_dependants(queue_db)
    end(queue_db, JobTransitions(queue_db.store), first, state)
    assert 0 < counts(queue_db)[JobState.BLOCKED] < MANY  # a part was settled with the end
    next_daemon = JobTransitions(queue_db.store)
    next_daemon.reload()
    assert settle_all(queue_db, next_daemon) > 1
    assert counts(queue_db) == expected
    assert queue_db.store.unsettled(revives=False) == []


def test_a_transaction_that_fails_settles_nothing_and_the_next_one_settles_it(queue_db: QueueDb) -> None:
    first = with_dependants(queue_db)
    transitions = JobTransitions(queue_db.store)
    end(queue_db, transitions, first, JobState.SUCCEEDED)
    before = counts(queue_db)

    def fail() -> None:
        with transitions.in_step(), queue_db.store.transaction():
            transitions.dependants.settle_more(200.0)
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        fail()
    assert counts(queue_db) == before
    settle_all(queue_db, transitions)
    assert counts(queue_db)[JobState.QUEUED] == MANY


def test_dependants_of_a_job_that_runs_again_meanwhile_stay_blocked(queue_db: QueueDb) -> None:
    first = with_dependants(queue_db)
    transitions = JobTransitions(queue_db.store)
    end(queue_db, transitions, first, JobState.SUCCEEDED)
    blocked = counts(queue_db)[JobState.BLOCKED]
    transitions.apply(queue_db.job(first), JobEvent.REQUEUE, 210.0)
    settle_all(queue_db, transitions)
    assert counts(queue_db)[JobState.BLOCKED] == blocked


def test_no_job_starts_while_a_queued_dependant_may_be_rejected(queue_db: QueueDb) -> None:
    (first,) = queue_db.add()
    ids = queue_db.add(MANY)  # they were unblocked by an earlier success of the first job
    queue_db.store.add_pairs((each, Dependency(job_id=first)) for each in ids)
    transitions = JobTransitions(queue_db.store)
    end(queue_db, transitions, first, JobState.FAILED)
    found = [transitions.dependants.may_reject_ready]
    settle_all(queue_db, transitions)
    found.append(transitions.dependants.may_reject_ready)
    assert found == [True, False]
    assert counts(queue_db)[JobState.REJECTED] == MANY


def test_a_cancelled_job_rejects_dependants_of_the_same_request_as_if_they_were_few(queue_db: QueueDb) -> None:
    found = []
    for count in (10, MANY):
        first = with_dependants(queue_db, count)
        requests = requests_of(queue_db, JobTransitions(queue_db.store))
        deque(requests.change(parse_selection(f"{first}-{first + count + 1}"), requests.cancel))
        found.append({queue_db.job(each).state for each in range(first + 1, first + count + 2)})
    assert found == [{JobState.REJECTED}, {JobState.REJECTED}]


@pytest.mark.parametrize("goes_on", ["the same daemon", "the next one"])
def test_an_interrupted_retry_is_continued(queue_db: QueueDb, goes_on: str) -> None:
    first = with_dependants(queue_db)
    transitions = JobTransitions(queue_db.store)
    end(queue_db, transitions, first, JobState.FAILED)
    settle_all(queue_db, transitions)
    requests = requests_of(queue_db, transitions)
    change = requests.change(parse_selection(str(first)), requests.retry)
    next(change)
    assert counts(queue_db)[JobState.REJECTED] > 1
    change.close()  # its client has gone
    daemon = requests if goes_on == "the same daemon" else requests_of(queue_db, JobTransitions(queue_db.store))
    pieces = 0
    while daemon.revive_more():
        pieces += 1
    assert pieces > 1
    assert counts(queue_db) == {JobState.QUEUED: 1, JobState.BLOCKED: MANY + 1}
    assert queue_db.store.unsettled(revives=True) == []
