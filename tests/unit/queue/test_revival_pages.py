"""Revivals read the dependants of a job page by page, and decide each once."""

from gpuyard.model.dependencies import Dependency, DependencyKind
from gpuyard.model.lifecycle import JobEvent, JobState
from gpuyard.queue.dependants import Revival
from gpuyard.queue.transitions import JobTransitions
from tests.unit.store import QueueDb


def test_all_of_several_pages_of_dependants_are_revived_in_order(queue_db: QueueDb) -> None:
    first, second = queue_db.add(2)
    dependants = queue_db.add(250, state=JobState.BLOCKED)
    on = [Dependency(job_id=job_id, kind=DependencyKind.OK) for job_id in (first, second)]
    queue_db.store.add_pairs((job_id, each) for job_id in dependants for each in on)
    transitions = JobTransitions(queue_db.store)
    for job_id in (first, second):
        transitions.dependants.begin()
        transitions.apply(queue_db.job(job_id), JobEvent.CANCEL, 200.0)
    while transitions.dependants.has_more:
        transitions.dependants.begin()
        transitions.dependants.settle_more(200.0)
    assert {queue_db.job(job_id).state for job_id in dependants} == {JobState.REJECTED}
    revival, revived, transactions = Revival(queue_db.store, transitions.dependants), list[int](), 0
    for job_id in (first, second):
        transitions.dependants.queue_or_block(queue_db.job(job_id), JobEvent.REQUEUE, 300.0)
        revival.add(job_id)
    while revival.has_undecided():
        transitions.dependants.begin()
        revived += revival.decide(300.0)
        transactions += 1
    assert revived == dependants
    assert transactions > 2, "one transaction revives some of very many"
    assert {queue_db.job(job_id).state for job_id in dependants} == {JobState.BLOCKED}
