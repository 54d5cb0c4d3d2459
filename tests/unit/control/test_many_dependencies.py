"""A job with many dependencies: the end of most of them decides nothing, and costs little."""

from contextlib import closing
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.control.controller import Controller
from gpuyard.control.transitions import JobTransitions
from gpuyard.control.user_requests import UserRequests
from gpuyard.core.job.dependencies import Dependency, DependencyKind, DependencyOutlook, outlook_of_all
from gpuyard.core.job.lifecycle import FINISHED, JobEvent, JobState
from gpuyard.core.job.selection import parse_selection
from gpuyard.core.job.submission import ArrayElement, Submission
from tests.fakes.clock import FakeClock
from tests.unit.store import SPEC, QueueDb

OK, ANY, FAILED = DependencyKind.OK, DependencyKind.ANY, DependencyKind.FAILED
ENDS = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)
_STATE_BY_PROSPECT = {
    DependencyOutlook.PENDING: JobState.BLOCKED,
    DependencyOutlook.MET: JobState.QUEUED,
    DependencyOutlook.NEVER: JobState.REJECTED,
}  # fmt: skip


def waiting_for(queue_db: QueueDb, *kinds: tuple[int, DependencyKind]) -> int:
    (job_id,) = queue_db.add(state=JobState.BLOCKED)
    queue_db.store.add_dependencies([job_id], [Dependency(job_id=on, kind=kind) for on, kind in kinds])
    return job_id


def end(queue_db: QueueDb, transitions: JobTransitions, job_id: int, state: JobState) -> None:
    queue_db.finish(job_id, 200.0, state)
    transitions.dependants.settle(job_id, 200.0)


@given(
    st.lists(st.tuples(st.integers(1, 5), st.sampled_from(DependencyKind)), min_size=1, max_size=8),
    st.permutations(range(1, 6)),
    st.lists(st.sampled_from(ENDS), min_size=5, max_size=5),
)
def test_a_job_is_queued_or_rejected_at_the_end_of_the_dependency_that_decides(
    kinds: list[tuple[int, DependencyKind]], order: list[int], ends: list[JobState]
) -> None:
    queue_db = QueueDb()
    with closing(queue_db.db):
        queue_db.add(5)
        transitions = JobTransitions(queue_db.store)
        job_id = waiting_for(queue_db, *kinds)
        for other in order:
            before = queue_db.job(job_id).state
            end(queue_db, transitions, other, ends[other - 1])
            if before is JobState.BLOCKED:
                decided = outlook_of_all(queue_db.store.dependencies(job_id))[0]
                assert queue_db.job(job_id).state is _STATE_BY_PROSPECT[decided]
        assert queue_db.job(job_id).state is not JobState.BLOCKED


@pytest.mark.parametrize(
    ("kinds", "ended", "decides"),
    [
        ([(1, ANY), (2, ANY)], 1, False),
        ([(1, ANY), (2, OK)], 1, False),
        ([(1, OK), (2, ANY)], 1, True),
        ([(1, FAILED), (2, ANY)], 1, True),
        ([(1, ANY), (1, OK), (2, ANY)], 1, True),
        ([(1, ANY)], 1, True),
    ],
)
def test_an_end_is_checked_unless_any_end_satisfies_and_other_dependencies_are_pending(
    kinds: list[tuple[int, DependencyKind]], ended: int, decides: bool
) -> None:
    queue_db = QueueDb()
    with closing(queue_db.db):
        queue_db.add(2)
        job_id = waiting_for(queue_db, *kinds)
        queue_db.finish(ended, 200.0)
        assert queue_db.store.still_waits_after(job_id, ended) is not decides


def test_a_dependency_that_is_retried_is_waited_for_again() -> None:
    queue_db = QueueDb()
    with closing(queue_db.db):
        queue_db.add(2)
        transitions = JobTransitions(queue_db.store)
        job_id = waiting_for(queue_db, (1, ANY), (2, ANY))
        end(queue_db, transitions, 1, JobState.FAILED)
        transitions.apply(queue_db.job(1), JobEvent.REQUEUE, 210.0)
        end(queue_db, transitions, 2, JobState.SUCCEEDED)
        assert queue_db.job(job_id).state is JobState.BLOCKED
        end(queue_db, transitions, 1, JobState.SUCCEEDED)
        assert queue_db.job(job_id).state is JobState.QUEUED


def test_a_rejected_dependency_counts_as_ended() -> None:
    queue_db = QueueDb()
    with closing(queue_db.db):
        queue_db.add(1)
        transitions = JobTransitions(queue_db.store)
        middle = waiting_for(queue_db, (1, OK))
        last = waiting_for(queue_db, (1, ANY), (middle, ANY))
        end(queue_db, transitions, 1, JobState.FAILED)
        assert queue_db.job(middle).state in FINISHED
        assert queue_db.job(last).state is JobState.QUEUED


def test_an_array_starts_if_its_dependency_ended_while_the_array_was_being_submitted(queue_db: QueueDb) -> None:
    (other,) = queue_db.add()
    transitions = JobTransitions(queue_db.store)
    controller = cast("Controller", SimpleNamespace(transitions=transitions))
    requests = UserRequests(controller, queue_db.store, queue_db.queries, FakeClock())
    count = 1_500  # too many for one chunk
    on = ((OK, parse_selection(str(other))),)
    like = Submission(token="t", spec=SPEC, priority=0, count=count, elements=[ArrayElement()] * count, dependencies=on)
    submission = requests.submit(like, "me")
    next(submission)
    end(queue_db, transitions, other, JobState.SUCCEEDED)
    for _ in submission:
        pass
    assert queue_db.job(other + count).state is JobState.QUEUED


def test_an_array_waits_if_its_failed_dependency_is_retried_while_the_array_is_being_submitted(
    queue_db: QueueDb,
) -> None:
    (other,) = queue_db.add()
    transitions = JobTransitions(queue_db.store)
    controller = cast("Controller", SimpleNamespace(transitions=transitions))
    requests = UserRequests(controller, queue_db.store, queue_db.queries, FakeClock())
    end(queue_db, transitions, other, JobState.FAILED)
    count = 1_500
    on = ((OK, parse_selection(str(other))),)
    like = Submission(token="t", spec=SPEC, priority=0, count=count, elements=[ArrayElement()] * count, dependencies=on)
    submission = requests.submit(like, "me")
    next(submission)
    for _ in requests.change(parse_selection(str(other)), requests.retry):
        pass
    for _ in submission:
        pass
    assert {queue_db.job(other + number).state for number in (1, count)} == {JobState.BLOCKED}


def test_a_retry_of_one_of_thousands_that_failed_costs_no_more_than_of_a_few() -> None:
    efforts = []
    for count in (10, 3000):
        queue_db = QueueDb()
        with closing(queue_db.db):
            ids = queue_db.add(count)
            waiting_for(queue_db, *((job_id, OK) for job_id in ids))
            transitions = JobTransitions(queue_db.store)
            for job_id in ids:
                queue_db.finish(job_id, 200.0, JobState.FAILED)
            transitions.dependants.settle(1, 200.0)
            transitions.apply(queue_db.job(1), JobEvent.REQUEUE, 300.0)
            efforts.append(queue_db.effort_of(lambda: transitions.dependants.revive(1, 300.0)))  # noqa: B023
    assert efforts[1] < 2 * efforts[0], efforts


def test_an_end_among_thousands_costs_no_more_than_among_a_few() -> None:
    efforts = []
    for count in (10, 3000):
        queue_db = QueueDb()
        with closing(queue_db.db):
            ids = queue_db.add(count)
            waiting_for(queue_db, *((job_id, ANY) for job_id in ids))
            transitions = JobTransitions(queue_db.store)
            queue_db.finish(1, 200.0)
            efforts.append(queue_db.effort_of(lambda: transitions.dependants.settle(1, 200.0)))  # noqa: B023
    few, many = efforts
    assert many < 2 * few
