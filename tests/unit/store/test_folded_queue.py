"""The folded queue: a row for each sweep and array, in the place of the first of its jobs in the list of all jobs."""

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.errors import UserError
from gpuyard.model.job import Usage
from gpuyard.model.job_progress import Figure, JobProgress
from gpuyard.model.lifecycle import FINISHED, JobState
from gpuyard.model.placeholders import ArrayElement
from gpuyard.store.arrays_and_sweeps import FoldedPage, Present, SweepTable, TableOrder, find_group, read_folded
from gpuyard.store.database import Database, open_database, open_reader
from gpuyard.store.job_store import JobStore
from gpuyard.store.queue_queries import QueueQueries
from gpuyard.store.row_codec import lane_of, to_json
from gpuyard.store.search_jobs import JobFilter, PageRange, Search
from tests.unit.store.sample_queue import SPEC, like, submit

NOW = 1_000_000.0
ALL = PageRange(offset=0, count=10_000)
PRESENT = Present(100.0)
# A submission: the number of jobs, and their priority.
SUBMISSIONS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 1)), max_size=8)
CHANGES = st.lists(st.tuples(st.integers(0, 60), st.sampled_from([*JobState, "priority", "delete"])), max_size=40)


class StoredQueue:
    """A queue on disk, with a writing and a reading connection."""

    def __init__(self, database: Database, reader: sqlite3.Connection) -> None:
        self.database, self.store, self.reader = database, JobStore(database), reader
        self.old_jobs = QueueQueries(database, self.store).old_jobs

    def add(self, *elements: ArrayElement, priority: int = 0, varies: tuple[str, ...] = ()) -> int:
        spec = replace(SPEC, is_array=len(elements) > 1, varies=varies)
        with self.store.transaction():
            return submit(self.store, replace(like(spec), priority=priority), elements or (ArrayElement(),))

    def put(self, job_id: int, state: JobState, at: float = 5.0) -> None:
        with self.store.transaction():
            due_at = at if state is JobState.DELAYED else None
            self.store.change_state(job_id, state, ended_at=at if state in FINISHED else None, due_at=due_at)

    def folded(self, page: PageRange = ALL, *, show_all: bool = True) -> FoldedPage:
        return read_folded(self.reader, {}, NOW, page, show_all=show_all)


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[StoredQueue]:
    database, _ = open_database(tmp_path / "queue.db")
    with closing(database), closing(open_reader(database.path)) as reader:
        yield StoredQueue(database, reader)


def fold(queue: StoredQueue) -> list[int]:
    """Return the rows that a walk over all jobs gives: groups by their first id, others by their own."""
    found = Search(queue.reader).page(JobFilter(), {}, NOW, ALL, show_all=True).ids
    jobs = filter(None, map(queue.store.job, found))
    return list(dict.fromkeys(job.group or job.id for job in jobs))


def shown(page: FoldedPage) -> list[int]:
    return [row.group.first if row.group else row.job_id for row in page.rows]


@settings(max_examples=60, deadline=None)
@given(SUBMISSIONS, CHANGES)
def test_rows_are_in_the_order_of_their_first_jobs_and_their_counts_are_right(
    tmp_path_factory: pytest.TempPathFactory, submissions: list[tuple[int, int]], changes: list[tuple[int, str]]
) -> None:
    database, _ = open_database(tmp_path_factory.mktemp("queue") / "queue.db")
    with closing(database), closing(open_reader(database.path)) as reader:
        queue = StoredQueue(database, reader)
        for count, priority in submissions:
            queue.add(*(ArrayElement(index=index) for index in range(count)), priority=priority)
        for at, (job_id, change) in enumerate(changes, 10):
            job = queue.store.job(job_id)
            if job is None:
                continue
            if change == "priority":
                with queue.store.transaction():
                    queue.store.set_priority(job_id, 7)
            elif change != "delete":
                queue.put(job_id, JobState(change), float(at))
            elif job.state in FINISHED:
                with queue.store.transaction():
                    queue.old_jobs.delete([job_id])
        expected, page = fold(queue), queue.folded()
        assert shown(page) == expected
        assert page.total == len(expected)
        pages = [queue.folded(PageRange(offset=offset, count=2)) for offset in range(0, len(expected) + 1, 2)]
        assert [row for part in pages for row in shown(part)] == expected
        for row in page.rows:
            if row.group is not None:
                jobs = [queue.store.job(each) for each in range(row.group.first, row.group.last + 1)]
                assert row.group.counts == Counter(job.state for job in jobs if job is not None)
                assert queue.store.job(row.job_id) is not None


def test_a_submission_that_is_not_complete_is_not_listed(queue: StoredQueue) -> None:
    with queue.store.transaction():
        number, first = queue.store.start_submission("", 3)
        spec_id = queue.store.add_spec(replace(SPEC, is_array=True))
        job = replace(like(SPEC), group=first, spec=replace(SPEC, is_array=True), state=JobState.HELD)
        lane = queue.store.ensure_lane(lane_of(job, number))
        queue.store.add_jobs(job, spec_id, lane, first, [ArrayElement(index=index) for index in range(3)])
    assert shown(queue.folded()) == []
    assert find_group(queue.reader, first) is None


def test_only_the_last_finished_rows_are_shown_unless_all_are_wanted(queue: StoredQueue) -> None:
    for at in range(14):
        first = queue.add(*(ArrayElement(index=index) for index in range(1 + at % 2)))
        for job_id in range(first, first + 1 + at % 2):
            queue.put(job_id, JobState.SUCCEEDED, float(at))
    assert (len(queue.folded(show_all=False).rows), queue.folded(show_all=False).total) == (10, 10)
    assert (len(queue.folded().rows), queue.folded().total) == (14, 14)


def counted_rows(connection: sqlite3.Connection, read: Callable[[], object]) -> int:
    """Return about how many steps SQLite's machine takes, in thousands."""
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    connection.set_progress_handler(count, 1000)
    read()
    connection.set_progress_handler(None, 0)
    return steps


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.HELD, JobState.SUCCEEDED])
def test_a_page_costs_no_more_for_large_groups(queue: StoredQueue, state: JobState) -> None:
    first = queue.add(*(ArrayElement(index=index) for index in range(5000)))
    with queue.store.transaction():
        for job_id in range(first, first + 4999):
            ended_at = 5.0 if state in FINISHED else None
            queue.store.change_state(job_id, state, ended_at=ended_at)
    queue.add()
    assert len(queue.folded().rows) == 2
    assert counted_rows(queue.reader, queue.folded) <= 3


VALUES = [("1e-3", "adam"), ("10", "sgd"), ("2", "nan"), ("2e-4", "Lion")]


def add_sweep(queue: StoredQueue) -> int:
    elements = (ArrayElement(values={"lr": lr, "by": by, "same": "1"}) for lr, by in VALUES)
    return queue.add(*elements, varies=("lr", "by"))


def sorted_ids(queue: StoredQueue, first: int, order: TableOrder, page: PageRange = ALL) -> list[int]:
    found = SweepTable(queue.reader).read(first + 1, order, page, PRESENT)
    assert found is not None
    return [job_id - first for job_id in found[3].ids]


def test_runs_are_sorted_by_numbers_and_then_by_texts(queue: StoredQueue) -> None:
    first = add_sweep(queue)
    assert sorted_ids(queue, first, TableOrder()) == [0, 1, 2, 3]
    assert sorted_ids(queue, first, TableOrder(column="lr")) == [3, 0, 2, 1]
    assert sorted_ids(queue, first, TableOrder(column="lr", is_descending=True)) == [1, 2, 0, 3]
    assert sorted_ids(queue, first, TableOrder(column="lr"), PageRange(offset=1, count=2)) == [0, 2]
    assert sorted_ids(queue, first, TableOrder(column="by")) == [3, 0, 2, 1]


def test_unknown_cells_are_last_in_both_directions_and_states_can_be_chosen(queue: StoredQueue) -> None:
    first = add_sweep(queue)
    with queue.store.transaction():
        queue.database.execute("UPDATE jobs SET started_at = 90.0 WHERE id = ?", (first + 2,))
        queue.database.execute("UPDATE jobs SET started_at = 80.0 WHERE id = ?", (first + 3,))
    queue.put(first + 3, JobState.FAILED, at=85.0)
    assert sorted_ids(queue, first, TableOrder(column="time")) == [3, 2, 0, 1]
    assert sorted_ids(queue, first, TableOrder(column="time", is_descending=True)) == [2, 3, 0, 1]
    assert sorted_ids(queue, first, TableOrder(states=(JobState.FAILED,))) == [3]
    found = SweepTable(queue.reader).read(first, TableOrder(states=(JobState.FAILED,)), ALL, PRESENT)
    assert found is not None
    group, _, columns, page = found
    assert [column.name for column in columns] == ["lr", "by", "state", "time"]
    assert (page.cells[first + 3], page.total) == (["2e-4", "Lion", "failed", 5.0], 1)
    assert group.counts == {JobState.QUEUED: 3, JobState.FAILED: 1}


def add_figures(queue: StoredQueue, job_id: int, figures: dict[str, float | None]) -> None:
    usage = Usage(progress=JobProgress(figures={name: Figure(last=last) for name, last in figures.items()}))
    with queue.store.transaction():
        values = (job_id, to_json(usage))
        query = "INSERT INTO attempts (job, number, keeper_pid, started_at, usage) VALUES (?, 1, 0, 90.0, ?)"
        queue.database.execute(query, values)
        queue.database.execute("UPDATE jobs SET attempts = 1, started_at = 90.0 WHERE id = ?", (job_id,))


def test_figures_of_runs_are_columns_that_sort_and_those_of_running_jobs_are_the_newest(queue: StoredQueue) -> None:
    first, name = add_sweep(queue), 'val/it\'s "loss"'
    add_figures(queue, first, {name: 0.5, "lr": 7.0})
    add_figures(queue, first + 1, {name: 0.25, "acc": 1.0})
    add_figures(queue, first + 2, {name: None})
    assert sorted_ids(queue, first, TableOrder(column=name)) == [1, 0, 2, 3]
    assert sorted_ids(queue, first, TableOrder(column=name, is_descending=True)) == [0, 1, 2, 3]
    assert sorted_ids(queue, first, TableOrder(column="lr")) == [3, 0, 2, 1]
    present = Present(100.0, {first + 1: {name: 0.75}, first + 3: {"f1": 0.1}, first + 4: {"elsewhere": 1.0}})
    found = SweepTable(queue.reader).read(first, TableOrder(column=name), ALL, present)
    assert found is not None
    _, _, columns, page = found
    assert [column.name for column in columns] == ["lr", "by", "state", name, "acc", "f1", "time"]
    assert [job_id - first for job_id in page.ids] == [0, 1, 2, 3]
    assert page.cells[first + 1] == ["10", "sgd", "queued", 0.75, 1.0, None, 10.0]
    assert page.cells[first + 3][3:6] == [None, None, 0.1]


def test_an_unknown_column_is_refused_and_a_single_job_is_no_sweep(queue: StoredQueue) -> None:
    first = add_sweep(queue)
    with pytest.raises(UserError, match="there is no column 'seed'"):
        sorted_ids(queue, first, TableOrder(column="seed"))
    assert SweepTable(queue.reader).read(queue.add(), TableOrder(), ALL, PRESENT) is None
    assert SweepTable(queue.reader).read(9999, TableOrder(), ALL, PRESENT) is None
