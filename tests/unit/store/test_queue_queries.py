"""Queries of users: selecting jobs, listing them, and deleting old jobs."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gpuyard.model.dependencies import Dependency
from gpuyard.model.job import Outcome, OutcomeKind
from gpuyard.model.lifecycle import FINISHED, JobState
from gpuyard.model.selection import JobSelection
from tests.unit.store import QueueDb, end_attempt, full_scans


def test_the_last_id_is_the_highest_that_was_assigned(queue_db: QueueDb) -> None:
    assert queue_db.queries.last_id() == 0
    queue_db.add(3)
    queue_db.db.execute("DELETE FROM jobs WHERE id = 3")
    assert queue_db.queries.last_id() == 3


def test_a_job_has_one_of_the_ids_and_meets_each_condition(queue_db: QueueDb) -> None:
    queue_db.add(2, name="big")
    queue_db.add(2, tag="night")
    queue_db.add(2)
    queue_db.add(1, name="big", tag="night")
    ranges = queue_db.queries.ranges
    assert ranges(JobSelection(names=("big",))) == [(1, 2), (7, 7)]
    assert ranges(JobSelection(tags=("night",))) == [(3, 4), (7, 7)]
    assert ranges(JobSelection(names=("big",), tags=("night",))) == [(7, 7)]
    assert ranges(JobSelection(names=("big", "small"), ranges=((2, 6),))) == [(2, 2)]
    assert ranges(JobSelection(names=("big",), tags=("night",), ranges=((1, 6),))) == []
    assert ranges(JobSelection(tags=("night",), is_all=True)) == [(3, 4), (7, 7)]
    assert ranges(JobSelection(is_all=True)) == [(1, 7)]
    assert ranges(JobSelection(names=("none",))) == []


def test_jobs_are_selected_by_state_user_and_the_time_of_their_submission_or_end(queue_db: QueueDb) -> None:
    queue_db.add(3)
    queue_db.add(2, state=JobState.HELD)
    queue_db.finish(2, 5000.0, JobState.FAILED)
    queue_db.finish(3, 6000.0, JobState.SUCCEEDED)
    submitted = queue_db.db.execute("SELECT max(submitted_at) FROM jobs").fetchone()[0]
    user = queue_db.db.execute("SELECT user FROM jobs").fetchone()[0]
    queue_db.db.execute("UPDATE jobs SET submitted_at = 7000 WHERE id = 5")
    ranges = queue_db.queries.ranges
    assert submitted < 5000
    assert ranges(JobSelection(states=(JobState.FAILED, JobState.HELD))) == [(2, 2), (4, 5)]
    assert ranges(JobSelection(since="1h", since_at=5500.0)) == [(3, 3), (5, 5)]
    assert ranges(JobSelection(since="1h", since_at=5500.0, states=(JobState.HELD,))) == [(5, 5)]
    assert ranges(JobSelection(users=(user,), ranges=((4, 9),))) == [(4, 5)]
    assert ranges(JobSelection(users=("nobody",))) == []


def test_a_range_ends_where_the_queue_does(queue_db: QueueDb) -> None:
    queue_db.add(3)
    assert queue_db.queries.ranges(JobSelection(ranges=((2, 10**17),))) == [(2, 3)]
    assert queue_db.queries.ranges(JobSelection(ranges=((8, 9),))) == []


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 10)), max_size=8))
def test_id_ranges_are_ordered_disjoint_and_cover_exactly_the_selection(spans: list[tuple[int, int]]) -> None:
    queue_db = QueueDb()
    queue_db.add(60)
    chosen = tuple((first, first + more) for first, more in spans)
    found = queue_db.queries.ranges(JobSelection(ranges=chosen))
    queue_db.db.close()
    covered = [each for first, last in found for each in range(first, last + 1)]
    assert covered == sorted({each for first, last in chosen for each in range(first, last + 1)})
    assert all(before[1] + 1 < after[0] for before, after in pairwise(found))


def test_only_existing_ids_are_returned_lazily(queue_db: QueueDb) -> None:
    queue_db.add(2500)
    queue_db.db.execute("DELETE FROM jobs WHERE id % 7 = 0")
    assert list(queue_db.queries.ids(10, 2400)) == [each for each in range(10, 2401) if each % 7]
    queue_db.store.change_state(1500, JobState.HELD)
    assert list(queue_db.queries.ids(1, 2500, [JobState.HELD, JobState.RUNNING])) == [1500]
    queue_db.add(5000)
    assert len(queue_db.statements(lambda: next(queue_db.queries.ids(1, 5000)))) == 1


def test_the_first_unfinished_job_is_found(queue_db: QueueDb) -> None:
    queue_db.add(4)
    for job_id, state in zip((1, 2, 4), sorted(FINISHED), strict=False):
        queue_db.finish(job_id, 5.0, state)
    assert queue_db.queries.first_unfinished(1, 4) == 3
    assert queue_db.queries.first_unfinished(1, 2) is None
    assert queue_db.queries.count_in([(1, 2), (4, 4)], JobState.QUEUED) == 0
    assert queue_db.queries.count_in([(1, 4)], JobState.QUEUED) == 1


def test_jobs_are_listed_by_state_and_page_by_page(queue_db: QueueDb) -> None:
    held = queue_db.add(3, state=JobState.HELD)
    (blocked,) = queue_db.add(state=JobState.BLOCKED)
    queue_db.add(2)
    page = queue_db.queries.in_state
    assert [job.id for job in page([JobState.HELD, JobState.BLOCKED], 10)] == [*held, blocked]
    assert [job.id for job in page([JobState.HELD], 2, 1)] == held[1:]
    assert page([JobState.QUEUED], 10) == []


def test_the_job_that_finished_last_is_listed_first(queue_db: QueueDb) -> None:
    for job_id, (at, state) in enumerate(zip((20.0, 40.0, 10.0, 30.0), sorted(FINISHED), strict=True), 1):
        queue_db.add()
        queue_db.finish(job_id, at, state)
    assert [job.id for job in queue_db.queries.finished(3)] == [2, 4, 1]
    assert [job.id for job in queue_db.queries.finished(3, 3)] == [3]


def test_events_are_returned_in_order(queue_db: QueueDb) -> None:
    one, other = queue_db.add(2)
    queue_db.store.add_event(one, 5.0, "held", "by hand")
    queue_db.store.add_event(other, 6.0, "queued")
    queue_db.store.add_event(one, 5.0, "queued")
    assert queue_db.queries.events(one) == [(5.0, "held", "by hand"), (5.0, "queued", None)]


def test_no_user_query_scans_all_jobs(queue_db: QueueDb) -> None:
    queue_db.add(3, name="big", tag="night")
    queue_db.finish(1, 5.0)
    queries = queue_db.queries
    for act in (
        lambda: list(queries.old_jobs.delete_ended_before(1.0)), lambda: queries.old_jobs.ended_before([1], 9.0),
        lambda: queries.finished(10), lambda: queries.events(1),
        lambda: queries.in_state([JobState.HELD, JobState.RUNNING], 10), lambda: queries.first_unfinished(1, 3),
        lambda: queries.ranges(JobSelection(names=("big",), tags=("night",), ranges=((1, 2),))),
        lambda: list(queries.ids(1, 3)), lambda: queries.count_in([(1, 3)], JobState.QUEUED),
        lambda: queries.jobs_in(1, 3, 10), lambda: queries.submission_of(1),
        lambda: queries.old_jobs.delete([1]),
    ):  # fmt: skip
        assert full_scans(queue_db.plan_of(act)) == []


def test_jobs_of_an_id_range_are_counted_by_state(queue_db: QueueDb) -> None:
    queue_db.add(5)
    queue_db.run(2)
    queue_db.finish(3, 9.0)
    assert queue_db.queries.counts_in(2, 4) == {JobState.QUEUED: 1, JobState.RUNNING: 1, JobState.SUCCEEDED: 1}
    assert queue_db.queries.counts_in(6, 9) == {}
    plan = queue_db.plan_of(lambda: queue_db.queries.counts_in(2, 4))
    assert plan[0].startswith("SEARCH jobs USING INTEGER PRIMARY KEY")


def test_jobs_are_read_by_ranges_and_ids_except_for_those_that_were_deleted(queue_db: QueueDb) -> None:
    queue_db.add(5)
    queue_db.db.execute("DELETE FROM jobs WHERE id = 3")
    assert [job.id for job in queue_db.queries.jobs_in(2, 5, 2)] == [2, 4]
    assert [job.id for job in queue_db.queries.jobs_in(5, 5, 2)] == [5]
    found = queue_db.queries.with_ids([4, 3, 1, 9])
    assert {job_id: job.id for job_id, job in found.items()} == {1: 1, 4: 4}
    assert queue_db.queries.with_ids([]) == {}


def test_a_queue_has_groups_while_a_job_of_an_array_is_kept(queue_db: QueueDb) -> None:
    queue_db.add(2)
    assert not queue_db.queries.has_groups()
    first, second = queue_db.add(2, is_array=True)
    assert queue_db.queries.has_groups()
    with queue_db.store.transaction():
        queue_db.queries.old_jobs.delete([first, second])
    assert not queue_db.queries.has_groups()


def test_a_submission_is_found_by_its_first_job_once_it_is_complete(queue_db: QueueDb) -> None:
    number, first = queue_db.store.start_submission("token", 3)
    assert queue_db.queries.submission_of(first) is None
    queue_db.store.complete_submission(number)
    assert queue_db.queries.submission_of(first) == (first, first + 2, "token")
    assert queue_db.queries.submission_of(first + 1) is None


def test_the_record_of_a_batch_is_deleted_with_its_last_run(queue_db: QueueDb) -> None:
    first, second = queue_db.add(2, is_array=True)
    (other,) = queue_db.add(is_array=True)
    for group in (first, other):
        queue_db.store.set_batch_state(group, "kept")
    for gone in (first, second):
        assert queue_db.store.batch_state(first) == "kept"
        with queue_db.store.transaction():
            queue_db.queries.old_jobs.delete([gone])
    assert queue_db.store.batch_state(first) is None
    assert queue_db.store.batch_state(other) == "kept"


def deleted(queue_db: QueueDb, before: float) -> list[int]:
    """Return the ids of the jobs that are deleted with those that ended before this time."""
    pieces = queue_db.queries.old_jobs.delete_ended_before(before)
    while True:
        try:
            next(pieces)
        except StopIteration as done:
            return sorted(done.value)


def test_an_old_job_is_deleted_once_no_job_depends_on_it(queue_db: QueueDb) -> None:
    old, awaited, between, new, waiting = queue_db.add(5)
    queue_db.store.add_pairs([(between, Dependency(job_id=awaited))])
    queue_db.store.add_pairs([(waiting, Dependency(job_id=between))])
    for job_id, at in ((old, 10.0), (awaited, 11.0), (between, 12.0), (new, 99.0)):
        queue_db.finish(job_id, at)
    assert deleted(queue_db, 50.0) == [old]
    queue_db.finish(waiting, 98.0)
    assert deleted(queue_db, 50.0) == []  # it could be retried
    assert deleted(queue_db, 98.5) == [awaited, between, waiting]


def test_a_long_chain_and_jobs_of_many_pieces_are_deleted_whatever_ended_first(queue_db: QueueDb) -> None:
    ids = queue_db.add(130)
    for earlier, later in pairwise(ids):
        queue_db.store.add_pairs([(later, Dependency(job_id=earlier))])
    for job_id in ids:
        queue_db.finish(job_id, 200.0 - job_id if job_id % 2 else 5.0)
    assert deleted(queue_db, 300.0) == ids
    for table in ("jobs", "specs", "lanes", "submissions", "dependencies"):
        assert queue_db.db.value(f"SELECT count(*) FROM {table}") == 0


def test_a_piece_of_deleting_costs_the_same_however_many_jobs_there_are(queue_db: QueueDb) -> None:
    def most(count: int) -> int:
        for job_id in [each for _ in range(count) for each in queue_db.add(is_array=True, group_limit=1)]:
            queue_db.finish(job_id, 5.0)
        pieces = queue_db.queries.old_jobs.delete_ended_before(9.0)
        return max(queue_db.effort_of(lambda: next(pieces, None)) for _ in range(count // 50 + 3))

    few = most(100)
    assert most(800) < 1.5 * few


def test_deleting_a_job_deletes_all_its_rows_and_no_others(queue_db: QueueDb) -> None:
    gone, stays = queue_db.add(2)
    (alone,) = queue_db.add(command=("alone",))
    queue_db.store.add_pairs([(stays, Dependency(job_id=gone))])
    for job_id in (gone, stays, alone):
        queue_db.run(job_id)
        end_attempt(queue_db.store, job_id, 1, Outcome(kind=OutcomeKind.SUCCEEDED), 10.0)
        queue_db.store.add_event(job_id, 10.0, "queued")
        queue_db.finish(job_id, 10.0)
    with queue_db.store.transaction():
        queue_db.queries.old_jobs.delete([gone, alone])
    for table, column in (("jobs", "id"), ("attempts", "job"), ("events", "job")):
        assert queue_db.db.execute(f"SELECT {column} FROM {table}").fetchall() == [(stays,)]
    assert queue_db.store.dependencies(stays) == []
    assert queue_db.store.counts()[JobState.SUCCEEDED] == 1
    assert queue_db.job(stays).spec.command == ("run", "{index}")
    assert queue_db.db.execute("SELECT count(*) FROM specs").fetchone() == (1,)
    assert queue_db.add() == [4]
