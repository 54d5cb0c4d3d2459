"""A job with many dependencies: the end of most of them decides nothing, and costs little."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.errors import UserError
from gpuyard.model.dependencies import Dependency, DependencyKind, DependencyOutlook, outlook_of_all
from gpuyard.model.lifecycle import FINISHED, JobEvent, JobState
from gpuyard.model.placeholders import ArrayElement
from gpuyard.model.selection import parse_selection
from gpuyard.model.submission import Submission
from gpuyard.queue.add_submission import InPieces
from gpuyard.queue.transitions import JobTransitions
from gpuyard.queue.user_requests import ChangeResult
from tests.fakes.user_requests import requests_of
from tests.unit.store import SPEC, QueueDb

OK, ANY, FAILED = DependencyKind.OK, DependencyKind.ANY, DependencyKind.FAILED
Act: TypeAlias = Callable[[], object]
ENDS = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)
_STATE_BY_PROSPECT = {
    DependencyOutlook.PENDING: JobState.BLOCKED,
    DependencyOutlook.MET: JobState.QUEUED,
    DependencyOutlook.NEVER: JobState.REJECTED,
}  # fmt: skip


def waiting_for(queue_db: QueueDb, *kinds: tuple[int, DependencyKind]) -> int:
    (job_id,) = queue_db.add(state=JobState.BLOCKED)
    queue_db.store.add_pairs((job_id, Dependency(job_id=on, kind=kind)) for on, kind in kinds)
    return job_id


def end(queue_db: QueueDb, transitions: JobTransitions, job_id: int, state: JobState) -> None:
    queue_db.finish(job_id, 200.0, state)
    with transitions.in_step():
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
    ("kinds", "state", "decides"),
    [
        ([(1, ANY), (2, ANY)], JobState.FAILED, False), ([(1, ANY), (2, OK)], JobState.FAILED, False),
        ([(1, OK), (2, ANY)], JobState.SUCCEEDED, False), ([(1, OK), (2, ANY)], JobState.FAILED, True),
        ([(1, ANY), (1, OK), (2, ANY)], JobState.CANCELLED, True), ([(1, ANY)], JobState.FAILED, True),
        ([(1, OK), (2, FAILED)], JobState.SUCCEEDED, True),
        ([(1, FAILED), (2, FAILED)], JobState.SUCCEEDED, False),
        ([(1, FAILED), (2, FAILED)], JobState.FAILED, True), ([(1, FAILED), (2, ANY)], JobState.FAILED, False),
        ([(1, FAILED), (2, ANY)], JobState.SUCCEEDED, True),
    ],
)  # fmt: skip
def test_all_dependencies_are_read_only_at_an_end_that_may_decide(
    kinds: list[tuple[int, DependencyKind]], state: JobState, decides: bool
) -> None:
    queue_db = QueueDb()
    with closing(queue_db.db):
        queue_db.add(2)
        job_id = waiting_for(queue_db, *kinds)
        queue_db.finish(1, 200.0, state)
        (dependant,) = queue_db.store.dependants_after(1, 0, 10)
        assert queue_db.store.may_decide([dependant], state) == ({job_id} if decides else set())


def test_a_dependency_that_is_retried_or_rejected() -> None:
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
    requests = requests_of(queue_db, transitions)
    count = 1_500  # too many for one chunk
    on = ((OK, parse_selection(str(other))),)
    like = Submission(token="t", spec=SPEC, priority=0, count=count, elements=[ArrayElement()] * count, dependencies=on)
    submission = requests.submit(like, "me")
    next(submission)
    end(queue_db, transitions, other, JobState.SUCCEEDED)
    for _ in submission:
        pass
    assert queue_db.job(other + count).state is JobState.QUEUED


@pytest.mark.parametrize("verb", ["retry", "retry_only"])
def test_an_array_waits_if_its_dependency_is_retried_while_it_is_being_submitted(queue_db: QueueDb, verb: str) -> None:
    (other,) = queue_db.add()
    transitions = JobTransitions(queue_db.store)
    requests = requests_of(queue_db, transitions)
    end(queue_db, transitions, other, JobState.FAILED)
    count = 1_500
    on = ((OK, parse_selection(str(other))),)
    like = Submission(token="t", spec=SPEC, priority=0, count=count, elements=[ArrayElement()] * count, dependencies=on)
    submission = requests.submit(like, "me")
    next(submission)
    revived = finish(requests.change(parse_selection(str(other)), getattr(requests, verb))).revived
    deque(submission)
    assert {queue_db.job(other + number).state for number in (1, count)} == {JobState.BLOCKED}
    assert revived == ()  # their ids are not known to any user yet


def test_an_array_is_refused_if_a_job_paired_with_it_is_deleted_meanwhile(queue_db: QueueDb) -> None:
    count = 1_500
    elements = [ArrayElement(index=index) for index in range(count)]
    for job_id in queue_db.add_each(elements):
        queue_db.finish(job_id, 200.0)
    requests = requests_of(queue_db, JobTransitions(queue_db.store))
    paired_with = (parse_selection(f"1-{count}"),)
    like = Submission(token="t", spec=SPEC, priority=0, count=count, elements=elements, after_each=paired_with)
    submission = requests.submit(like, "me")
    next(submission)
    queue_db.queries.old_jobs.delete([count])
    with pytest.raises(UserError, match=f"job {count} was deleted while these were submitted"):
        deque(submission)
    while requests.drop_refused():
        pass
    assert queue_db.store.job(count + 1) is None


def with_dependant(
    queue_db: QueueDb, count: int, ends: Sequence[JobState], kind: DependencyKind = OK
) -> JobTransitions:
    """Add jobs that end as said, in turn, one job that depends on all of them, and one that depends on that."""
    ids = queue_db.add(count)
    dependant = waiting_for(queue_db, *((job_id, kind) for job_id in ids))
    waiting_for(queue_db, (dependant, OK))
    transitions = JobTransitions(queue_db.store)
    for job_id in ids if ends else ():
        end(queue_db, transitions, job_id, ends[job_id * len(ends) // (count + 1)])
    return transitions


def finish(change: InPieces[ChangeResult]) -> ChangeResult:
    results: list[ChangeResult] = []

    def run() -> InPieces[None]:
        results.append((yield from change))

    deque(run())
    return results[0]


def retried(queue_db: QueueDb, count: int, ends: Sequence[JobState], kind: DependencyKind = OK) -> Act:
    requests = requests_of(queue_db, with_dependant(queue_db, count, ends, kind))
    first_half = parse_selection(f"1-{count // 2}")
    return lambda: deque(requests.change(first_half, requests.retry))


def cancelled(queue_db: QueueDb, count: int, kind: DependencyKind) -> Act:
    requests = requests_of(queue_db, with_dependant(queue_db, count, (), kind))
    return lambda: deque(requests.change(parse_selection(f"1-{count}"), requests.cancel))


def ended(queue_db: QueueDb, count: int, kind: DependencyKind, state: JobState) -> Act:
    transitions = with_dependant(queue_db, count, (), kind)

    def act() -> None:
        for job_id in range(1, count + 1):
            end(queue_db, transitions, job_id, state)

    return act


def submitted(queue_db: QueueDb, count: int, state: JobState, kind: DependencyKind) -> Act:
    for job_id in queue_db.add(count):
        queue_db.finish(job_id, 200.0, state)
    requests = requests_of(queue_db, JobTransitions(queue_db.store))
    on = ((kind, parse_selection(f"1-{count}")),)
    like = Submission(token="t", spec=SPEC, priority=0, count=1, elements=[ArrayElement()], dependencies=on)
    return lambda: deque(requests.submit(like, "me"))


def paired(queue_db: QueueDb, count: int, state: JobState) -> Act:
    elements = [ArrayElement(index=index) for index in range(count)]
    for job_id in queue_db.add_each(elements):
        queue_db.finish(job_id, 200.0, state)
    requests = requests_of(queue_db, JobTransitions(queue_db.store))
    selection = parse_selection(f"1-{count}")
    like = Submission(token="t", spec=SPEC, priority=0, count=count, elements=elements, after_each=(selection,))
    return lambda: (deque(requests.submit(like, "me")), deque(requests.change(selection, requests.retry)))


@pytest.mark.parametrize(
    "prepared",
    [
        pytest.param(lambda db, n: retried(db, n, [JobState.FAILED]), id="retry"),
        pytest.param(lambda db, n: retried(db, n, [JobState.FAILED, JobState.SUCCEEDED]), id="retry of the first half"),
        pytest.param(lambda db, n: retried(db, n, [JobState.SUCCEEDED], FAILED), id="retry of what had to fail"),
        pytest.param(lambda db, n: cancelled(db, n, OK), id="cancel"),
        pytest.param(lambda db, n: cancelled(db, n, ANY), id="cancel, after any end"),
        pytest.param(lambda db, n: ended(db, n, OK, JobState.SUCCEEDED), id="successes"),
        pytest.param(lambda db, n: ended(db, n, FAILED, JobState.FAILED), id="failures"),
        pytest.param(lambda db, n: submitted(db, n, JobState.SUCCEEDED, OK), id="submit after successes"),
        pytest.param(lambda db, n: submitted(db, n, JobState.FAILED, ANY), id="submit after ends"),
        pytest.param(lambda db, n: paired(db, n, JobState.FAILED), id="after each"),
    ],
)
def test_the_cost_of_jobs_with_one_dependant_grows_with_their_number(prepared: Callable[[QueueDb, int], Act]) -> None:
    efforts = []
    for count in (100, 1000):
        queue_db = QueueDb()
        with closing(queue_db.db):
            efforts.append(queue_db.effort_of(prepared(queue_db, count)))
    assert efforts[1] < 20 * efforts[0], efforts


def test_jobs_in_between_are_revived_before_later_jobs_of_the_same_request(queue_db: QueueDb) -> None:
    transitions = with_dependant(queue_db, 1, [JobState.FAILED])
    transitions.take_events()
    requests = requests_of(queue_db, transitions)
    change = requests.change(parse_selection("1,3"), requests.retry)
    deque(change)
    assert {queue_db.job(job_id).state for job_id in (2, 3)} == {JobState.BLOCKED}
    assert transitions.take_events() == []  # job 3 was not rejected again on the way
