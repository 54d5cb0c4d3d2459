"""What people ask of the queue: which jobs are meant, what stands where, and what may be forgotten."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gpuyard.core.job.job import Dependency, Outcome, OutcomeKind
from gpuyard.core.job.lifecycle import FINISHED, JobState
from gpuyard.core.job.selection import JobSelection
from tests.unit.store import Shelf, full_scans

# Which jobs


def test_the_last_id_is_the_highest_that_was_given_out(shelf: Shelf) -> None:
    assert shelf.catalogue.last_id() == 0
    shelf.add(3)
    shelf.db.execute("DELETE FROM jobs WHERE id = 3")
    assert shelf.catalogue.last_id() == 3


def test_jobs_are_meant_by_id_name_and_tag_at_once(shelf: Shelf) -> None:
    shelf.add(2, name="big")
    shelf.add(2, tag="night")
    shelf.add(2)
    shelf.add(1, name="big", tag="night")
    ranges = shelf.catalogue.ranges
    assert ranges(JobSelection(names=("big",))) == [(1, 2), (7, 7)]
    assert ranges(JobSelection(tags=("night",))) == [(3, 4), (7, 7)]
    assert ranges(JobSelection(names=("big",), tags=("night",), ranges=((6, 6),))) == [(1, 4), (6, 7)]
    assert ranges(JobSelection(is_all=True)) == [(1, 7)]
    assert ranges(JobSelection(names=("none",))) == []


def test_a_range_ends_where_the_queue_does(shelf: Shelf) -> None:
    shelf.add(3)
    assert shelf.catalogue.ranges(JobSelection(ranges=((2, 10**17),))) == [(2, 3)]
    assert shelf.catalogue.ranges(JobSelection(ranges=((8, 9),))) == []


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 10)), max_size=8))
def test_stretches_are_in_order_apart_and_cover_just_what_is_meant(spans: list[tuple[int, int]]) -> None:
    shelf = Shelf()
    shelf.add(60)
    chosen = tuple((first, first + more) for first, more in spans)
    found = shelf.catalogue.ranges(JobSelection(ranges=chosen))
    shelf.db.close()
    covered = [each for first, last in found for each in range(first, last + 1)]
    assert covered == sorted({each for first, last in chosen for each in range(first, last + 1)})
    assert all(before[1] + 1 < after[0] for before, after in pairwise(found))


def test_ids_are_those_that_exist_however_many(shelf: Shelf) -> None:
    shelf.add(2500)
    shelf.db.execute("DELETE FROM jobs WHERE id % 7 = 0")
    assert list(shelf.catalogue.ids(10, 2400)) == [each for each in range(10, 2401) if each % 7]
    shelf.store.change_state(1500, JobState.HELD)
    assert list(shelf.catalogue.ids(1, 2500, [JobState.HELD, JobState.RUNNING])) == [1500]


def test_ids_are_fetched_as_they_are_asked_for(shelf: Shelf) -> None:
    shelf.add(5000)
    assert len(shelf.statements(lambda: next(shelf.catalogue.ids(1, 5000)))) == 1


def test_the_first_that_has_not_finished_is_found(shelf: Shelf) -> None:
    shelf.add(4)
    for job_id, state in zip((1, 2, 4), sorted(FINISHED), strict=False):
        shelf.finish(job_id, 5.0, state)
    assert shelf.catalogue.first_unfinished(1, 4) == 3
    assert shelf.catalogue.first_unfinished(1, 2) is None
    assert shelf.catalogue.count_in([(1, 2), (4, 4)], JobState.QUEUED) == 0
    assert shelf.catalogue.count_in([(1, 4)], JobState.QUEUED) == 1


# What stands where


def test_jobs_are_listed_by_state_and_page_by_page(shelf: Shelf) -> None:
    held = shelf.add(3, state=JobState.HELD)
    (blocked,) = shelf.add(state=JobState.BLOCKED)
    shelf.add(2)
    page = shelf.catalogue.in_state
    assert [job.id for job in page([JobState.HELD, JobState.BLOCKED], 10)] == [*held, blocked]
    assert [job.id for job in page([JobState.HELD], 2, 1)] == held[1:]
    assert page([JobState.QUEUED], 10) == []


def test_the_last_that_finished_is_listed_first(shelf: Shelf) -> None:
    for job_id, (at, state) in enumerate(zip((20.0, 40.0, 10.0, 30.0), sorted(FINISHED), strict=True), 1):
        shelf.add()
        shelf.finish(job_id, at, state)
    assert [job.id for job in shelf.catalogue.finished(3)] == [2, 4, 1]
    assert [job.id for job in shelf.catalogue.finished(3, 3)] == [3]


def test_a_story_is_told_in_the_order_in_which_it_happened(shelf: Shelf) -> None:
    one, other = shelf.add(2)
    shelf.store.add_event(one, 5.0, "held", "by hand")
    shelf.store.add_event(other, 6.0, "queued")
    shelf.store.add_event(one, 5.0, "queued")
    assert shelf.catalogue.events(one) == [(5.0, "held", "by hand"), (5.0, "queued", None)]


def test_nothing_that_people_ask_scans_all_jobs(shelf: Shelf) -> None:
    shelf.add(3, name="big", tag="night")
    shelf.finish(1, 5.0)
    catalogue = shelf.catalogue
    for act in (
        lambda: catalogue.finished(10), lambda: catalogue.deletable(10.0, 10), lambda: catalogue.events(1),
        lambda: catalogue.in_state([JobState.HELD, JobState.RUNNING], 10), lambda: catalogue.first_unfinished(1, 3),
        lambda: catalogue.ranges(JobSelection(names=("big",), tags=("night",), ranges=((1, 2),))),
        lambda: list(catalogue.ids(1, 3)), lambda: catalogue.count_in([(1, 3)], JobState.QUEUED),
        lambda: catalogue.jobs_in(1, 3, 10), lambda: catalogue.submission_of(1),
        lambda: catalogue.delete_jobs([1]),
    ):  # fmt: skip
        assert full_scans(shelf.plan_of(act)) == []


# Batches


def test_jobs_of_a_stretch_are_counted_by_their_states(shelf: Shelf) -> None:
    shelf.add(5)
    shelf.run(2)
    shelf.finish(3, 9.0)
    assert shelf.catalogue.counts_in(2, 4) == {JobState.QUEUED: 1, JobState.RUNNING: 1, JobState.SUCCEEDED: 1}
    assert shelf.catalogue.counts_in(6, 9) == {}
    plan = shelf.plan_of(lambda: shelf.catalogue.counts_in(2, 4))
    assert plan[0].startswith("SEARCH jobs USING INTEGER PRIMARY KEY")


def test_jobs_of_a_stretch_are_read_page_by_page_in_the_order_of_their_ids(shelf: Shelf) -> None:
    shelf.add(5)
    shelf.db.execute("DELETE FROM jobs WHERE id = 3")
    assert [job.id for job in shelf.catalogue.jobs_in(2, 5, 2)] == [2, 4]
    assert [job.id for job in shelf.catalogue.jobs_in(5, 5, 2)] == [5]


def test_a_submission_is_found_by_its_first_job_once_all_of_it_is_there(shelf: Shelf) -> None:
    number, first = shelf.store.start_submission("token", 3)
    assert shelf.catalogue.submission_of(first) is None
    shelf.store.complete_submission(number)
    assert shelf.catalogue.submission_of(first) == (first, first + 2, "token")
    assert shelf.catalogue.submission_of(first + 1) is None


# What may be forgotten


def test_what_is_kept_of_a_batch_goes_with_the_last_of_its_runs(shelf: Shelf) -> None:
    first, second = shelf.add(2, is_array=True)
    (other,) = shelf.add(is_array=True)
    for group in (first, other):
        shelf.store.set_batch_state(group, "kept")
    for gone in (first, second):
        assert shelf.store.batch_state(first) == "kept"
        with shelf.store.transaction():
            shelf.catalogue.delete_jobs([gone])
            shelf.catalogue.delete_unreferenced()
    assert shelf.store.batch_state(first) is None
    assert shelf.store.batch_state(other) == "kept"


def test_old_jobs_are_forgettable_once_nobody_waits_for_them(shelf: Shelf) -> None:
    old, awaited, new, waiting = shelf.add(4)
    shelf.store.add_dependencies([waiting], [Dependency(job_id=awaited)])
    for job_id, at in ((old, 10.0), (awaited, 11.0), (new, 99.0)):
        shelf.run(job_id)
        shelf.store.end_attempt(job_id, 1, Outcome(kind=OutcomeKind.SUCCEEDED), at)
        shelf.finish(job_id, at)
    assert shelf.catalogue.deletable(50.0, 10) == [(old, 1)]
    shelf.finish(waiting, 98.0)
    assert shelf.catalogue.deletable(50.0, 10) == [(old, 1), (awaited, 1)]
    assert shelf.catalogue.deletable(50.0, 1) == [(old, 1)]


def test_all_that_was_known_of_a_forgotten_job_goes_and_nothing_else(shelf: Shelf) -> None:
    gone, stays = shelf.add(2)
    (alone,) = shelf.add(command=("alone",))
    shelf.store.add_dependencies([stays], [Dependency(job_id=gone)])
    for job_id in (gone, stays, alone):
        shelf.run(job_id)
        shelf.store.end_attempt(job_id, 1, Outcome(kind=OutcomeKind.SUCCEEDED), 10.0)
        shelf.store.add_event(job_id, 10.0, "told")
        shelf.finish(job_id, 10.0)
    with shelf.store.transaction():
        shelf.catalogue.delete_jobs([gone, alone])
    for table, column in (("jobs", "id"), ("attempts", "job"), ("events", "job")):
        assert shelf.db.execute(f"SELECT {column} FROM {table}").fetchall() == [(stays,)]
    assert shelf.store.dependencies(stays) == []
    assert shelf.store.counts()[JobState.SUCCEEDED] == 1
    assert shelf.job(stays).spec.command == ("run", "{index}")
    assert shelf.db.execute("SELECT count(*) FROM specs").fetchone() == (1,)
    assert shelf.add() == [4]
