"""Jobs that are changed together get the same state, reason and events as jobs that are changed one by one."""

import random
from typing import Any, cast

import pytest

from gpuyard.model.dependencies import Dependency, DependencyKind
from gpuyard.model.job import Attempt, HandedOver, PublishedEventKind
from gpuyard.model.lifecycle import FINISHED, LIVE, JobState
from gpuyard.model.selection import parse_selection
from gpuyard.queue.add_submission import InPieces
from gpuyard.queue.transitions import JobTransitions
from gpuyard.queue.user_requests import ChangeResult
from tests.fakes.user_requests import requests_of
from tests.unit.store import QueueDb

VERBS = ("cancel", "hold", "release", "retry")


def finish(pieces: InPieces[ChangeResult]) -> ChangeResult:
    while True:
        try:
            next(pieces)
        except StopIteration as done:
            return cast("ChangeResult", done.value)


def changed(seed: int, verb: str, *, together: bool) -> tuple[ChangeResult, list[Any], list[Any], dict[Any, int]]:
    """Change all jobs of a random queue; return the result, the jobs, the events per job, and how many finished."""
    queue_db, dice = QueueDb(), random.Random(seed)
    states = [state for state in JobState if state not in LIVE]
    for _ in range(30):
        state = dice.choice(states)
        (job_id,) = queue_db.add(name=dice.choice((None, "named")))
        queue_db.db.execute("UPDATE jobs SET failures = ? WHERE id = ?", (dice.randrange(3), job_id))
        if state is JobState.DELAYED:
            queue_db.store.change_state(job_id, state, due_at=500.0)
        elif state is not JobState.QUEUED:
            queue_db.store.change_state(job_id, state, ended_at=200.0 if state in FINISHED else None, reason="before")
        if job_id > 1 and dice.random() < 0.3:
            kind = dice.choice(list(DependencyKind))
            queue_db.store.add_pairs([(job_id, Dependency(job_id=dice.randrange(1, job_id), kind=kind))])
    transitions = JobTransitions(queue_db.store)
    requests = requests_of(queue_db, transitions)
    if not together:
        requests._changes_of_many.clear()
    result = finish(requests.change(parse_selection("all"), getattr(requests, verb)))
    jobs = queue_db.db.execute(
        "SELECT id, state, reason, due_at, ended_at, queued_at, outcome, failures, growth, lane FROM jobs ORDER BY id"
    ).fetchall()
    events = queue_db.db.execute("SELECT job, at, kind, text FROM events ORDER BY job, id").fetchall()
    finished: dict[Any, int] = {}
    for event in transitions.take_events():
        assert event.kind is PublishedEventKind.FINISHED
        finished[event.job.state] = finished.get(event.job.state, 0) + event.jobs
    assert transitions.finished == sum(finished.values())
    queue_db.db.close()
    return result, jobs, events, finished


@pytest.mark.parametrize("verb", VERBS)
def test_changing_jobs_together_is_the_same_as_one_by_one(verb: str) -> None:
    was_changed = 0
    for seed in range(25):
        together, one_by_one = changed(seed, verb, together=True), changed(seed, verb, together=False)
        assert together == one_by_one, f"seed {seed}"
        was_changed += len(together[0].ids)
    assert was_changed > 50


@pytest.mark.parametrize("verb", VERBS)
def test_the_statements_for_many_jobs_do_not_grow_with_their_number(queue_db: QueueDb, verb: str) -> None:
    state = {"release": JobState.HELD, "retry": JobState.CANCELLED}.get(verb, JobState.QUEUED)
    ids = queue_db.add(100, state=state, ended_at=120.0 if state in FINISHED else None)
    requests = requests_of(queue_db, JobTransitions(queue_db.store))
    act = getattr(requests, verb)

    def statements(selected: str) -> int:
        seen = queue_db.statements(lambda: finish(requests.change(parse_selection(selected), act)))
        return len(set(seen))  # a statement is reported again for each call of a trigger

    few, many = statements("1-10"), statements("11-100")
    assert many <= few + 2
    assert len({queue_db.job(job_id).state for job_id in ids}) == 1


def test_cleaning_takes_as_many_statements_for_many_jobs_as_for_few(queue_db: QueueDb) -> None:
    requests = requests_of(queue_db, JobTransitions(queue_db.store))

    def statements(count: int) -> int:
        for job_id in queue_db.add(count):
            queue_db.finish(job_id, 1.0)
        seen = queue_db.statements(lambda: list(requests.clean(0.0)))
        return len(set(seen))

    assert statements(10) == statements(45)
    assert queue_db.db.value("SELECT count(*) FROM jobs") == queue_db.db.value("SELECT count(*) FROM specs") == 0


@pytest.mark.parametrize("verb", ["cancel", "hold"])
def test_a_job_that_waits_for_its_turn_in_a_slice_is_unchanged(queue_db: QueueDb, verb: str) -> None:
    """Its keeper has not answered in time."""
    queue_db.add(3)
    transitions = JobTransitions(queue_db.store)
    transitions.start(queue_db.job(2), Attempt(job_id=2, number=1, phase=HandedOver(at=110.0)))
    requests = requests_of(queue_db, transitions)
    result = finish(requests.change(parse_selection("all"), getattr(requests, verb)))
    assert result.ids == (1, 3)
    assert [(each.id, each.state) for each in result.unchanged] == [(2, "pending")]
    assert "try again" in result.unchanged[0].reason
