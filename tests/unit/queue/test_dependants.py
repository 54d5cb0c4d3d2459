"""What the end of jobs and another attempt at them mean for the jobs that depend on them, against a plain model."""

from contextlib import closing

from hypothesis import given
from hypothesis import strategies as st

from gpuyard.model.dependencies import Dependency, DependencyKind, DependencyOutlook, outlook_of_all
from gpuyard.model.lifecycle import FINISHED, JobEvent, JobState
from gpuyard.queue.dependants import Revival
from gpuyard.queue.transitions import JobTransitions
from tests.unit.store import QueueDb

OK = DependencyKind.OK
ENDS = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)
STATE_BY_OUTLOOK = {
    DependencyOutlook.PENDING: JobState.BLOCKED,
    DependencyOutlook.MET: JobState.QUEUED,
    DependencyOutlook.NEVER: JobState.REJECTED,
}
# By job: the jobs that it depends on, which have lower ids.
Graph = list[dict[int, DependencyKind]]


class Model:
    """The states of jobs, by the words of the documentation alone. Jobs are numbered from 1."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.states: dict[int, JobState] = {}
        for job_id in range(1, len(graph) + 1):
            self.states[job_id] = STATE_BY_OUTLOOK[self.outlook(job_id)]

    def outlook(self, job_id: int) -> DependencyOutlook:
        others = [(other, kind, self.states[other]) for other, kind in self.graph[job_id - 1].items()]
        return outlook_of_all(others)[0]

    def end(self, job_id: int, state: JobState) -> None:
        self.states[job_id] = state
        for dependant in self.dependants(job_id):
            before, now = self.states[dependant], STATE_BY_OUTLOOK[self.outlook(dependant)]
            if before in (JobState.BLOCKED, JobState.QUEUED) and now is JobState.REJECTED:
                self.end(dependant, now)
            elif before is JobState.BLOCKED:
                self.states[dependant] = now

    def retry(self, job_id: int) -> set[int]:
        self.states[job_id] = STATE_BY_OUTLOOK[self.outlook(job_id)]
        found, size = {job_id}, 0
        while len(found) > size:  # until there are no more
            size = len(found)
            for dependant in {each for other in found for each in self.dependants(other)}:
                may_start = self.outlook(dependant) is not DependencyOutlook.NEVER
                if self.states[dependant] is JobState.REJECTED and may_start:
                    self.states[dependant] = STATE_BY_OUTLOOK[self.outlook(dependant)]
                    found.add(dependant)
        return found - {job_id}

    def dependants(self, job_id: int) -> list[int]:
        return [each for each, on in enumerate(self.graph, 1) if job_id in on]


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    kinds = st.sampled_from(DependencyKind)
    return [
        draw(st.dictionaries(st.integers(1, job_id - 1), kinds, max_size=3)) if job_id > 1 else {}
        for job_id in range(1, draw(st.integers(2, 7)) + 1)
    ]


def fill(queue_db: QueueDb, graph: Graph) -> JobTransitions:
    for job_id, on in enumerate(graph, 1):
        queue_db.add(state=JobState.BLOCKED if on else JobState.QUEUED)
        queue_db.store.add_pairs((job_id, Dependency(job_id=other, kind=on[other])) for other in on)
    return JobTransitions(queue_db.store)


def revive(transitions: JobTransitions, *job_ids: int) -> list[int]:
    revival = Revival(transitions.store, transitions.dependants)
    for job_id in job_ids:
        revival.add(job_id)
    return revival.decide(300.0)


def states_in(queue_db: QueueDb) -> dict[int, JobState]:
    return {job_id: JobState(state) for job_id, state in queue_db.db.execute("SELECT id, state FROM jobs").fetchall()}


@given(graphs(), st.lists(st.tuples(st.integers(1, 7), st.sampled_from([*ENDS, None])), max_size=20))
def test_ends_and_retries_do_what_the_model_says(graph: Graph, steps: list[tuple[int, JobState | None]]) -> None:
    queue_db, model = QueueDb(), Model(graph)
    with closing(queue_db.db):
        transitions = fill(queue_db, graph)
        for job_id, end in steps:
            before = model.states.get(job_id)
            if end is not None and before is JobState.QUEUED:
                queue_db.finish(job_id, 200.0, end)
                transitions.dependants.settle(job_id, 200.0)
                model.end(job_id, end)
            elif end is None and before in FINISHED:
                transitions.dependants.queue_or_block(queue_db.job(job_id), JobEvent.REQUEUE, 300.0)
                assert set(revive(transitions, job_id)) == model.retry(job_id)
            assert states_in(queue_db) == model.states


def test_a_job_that_another_failure_keeps_from_starting_is_not_revived(queue_db: QueueDb) -> None:
    transitions = fill(queue_db, [{}, {}, {1: OK, 2: OK}, {3: OK}])
    for job_id in (1, 2):
        queue_db.finish(job_id, 200.0, JobState.FAILED)
        transitions.dependants.settle(job_id, 200.0)
    transitions.apply(queue_db.job(1), JobEvent.REQUEUE, 300.0)
    assert revive(transitions, 1) == []
    transitions.apply(queue_db.job(2), JobEvent.REQUEUE, 301.0)
    assert revive(transitions, 2) == [3, 4]


def test_a_job_that_was_held_when_it_was_skipped_is_held_again(queue_db: QueueDb) -> None:
    transitions = fill(queue_db, [{}, {1: OK}])
    transitions.apply(queue_db.job(2), JobEvent.HOLD, 150.0, "held until `gpuyard release`")
    queue_db.finish(1, 200.0, JobState.FAILED)
    transitions.dependants.settle(1, 200.0)
    assert queue_db.job(2).reason == "skipped: dependency 1 failed; it was held"
    transitions.apply(queue_db.job(1), JobEvent.REQUEUE, 300.0)
    assert revive(transitions, 1) == [2]
    assert queue_db.job(2).state is JobState.HELD


def test_a_job_that_was_rejected_for_another_reason_is_not_revived(queue_db: QueueDb) -> None:
    transitions = fill(queue_db, [{}, {1: DependencyKind.ANY}])
    queue_db.finish(1, 200.0, JobState.FAILED)
    transitions.dependants.settle(1, 200.0)
    transitions.apply(queue_db.job(2), JobEvent.REJECT, 210.0, "the command cannot be passed to a program")
    transitions.apply(queue_db.job(1), JobEvent.REQUEUE, 300.0)
    assert revive(transitions, 1) == []
