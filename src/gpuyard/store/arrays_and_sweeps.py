"""Arrays and sweeps: the queue with one row for each of them, and the runs of one as a table that any column sorts.

Jobs of a group have consecutive ids, from its own id up to the last id of its submission: so the cost of a page does
not grow with the size of groups. Their counts are kept by triggers (`schema.sql`). A column of the table is an SQL
expression over `jobs`."""

import heapq
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar, cast

from gpuyard.errors import UserError
from gpuyard.model.job import Job
from gpuyard.model.job_progress import MOST_FIGURES
from gpuyard.model.lifecycle import FINISHED, JobState
from gpuyard.policy.queue_order import Candidate, LaneQueue, Party, full_order
from gpuyard.store.database import Database
from gpuyard.store.job_store import JobStore
from gpuyard.store.search_jobs import LIVE_IN_ORDER, NOT_READY, RECENTLY_FINISHED, PageRange, one_snapshot

_PAGE = 64
_IN_STATE = (
    "SELECT id, group_id, 0 FROM jobs INDEXED BY jobs_not_queued "
    "WHERE state = ? AND ended_at IS NULL AND state <> 'queued' AND id > ? ORDER BY id LIMIT ?"
)
_READY = (
    "SELECT id, group_id, coalesce(queued_at, submitted_at) FROM jobs INDEXED BY jobs_ready "
    "WHERE state = 'queued' AND lane = ? AND id > ? ORDER BY id LIMIT ?"
)


class FoldedRow(NamedTuple):
    """A job, or a group with a job that stands for it: the one that is first in the list of all jobs."""

    job_id: int
    group: "GroupCounts | None" = None


class FoldedPage(NamedTuple):
    """The rows of a page, and the number of rows on all pages."""

    rows: list[FoldedRow]
    total: int


class GroupCounts:
    """An array or a sweep: the ids that it got, and how many of its jobs are in which state."""

    def __init__(self, first: int, last: int, *, is_complete: bool) -> None:
        self.first, self.last, self.is_complete = first, last, is_complete
        self.counts: dict[JobState, int] = {}
        self.ended_at: float | None = None  # when the last of its finished jobs ended

    @property
    def is_finished(self) -> bool:
        return self.counts.keys() <= FINISHED


def find_group(connection: sqlite3.Connection, job_id: int) -> GroupCounts | None:
    """Return the group of this job, or None if it belongs to none, or is not listed yet."""
    row = connection.execute("SELECT group_id FROM jobs WHERE id = ?", (job_id,)).fetchone()
    group_id = job_id if row is None else row[0]  # the first job may have been deleted
    group = _read_groups(connection, "AND group_id = ?", (group_id,)).get(group_id)
    return group if group is not None and group.is_complete else None


def read_folded(
    connection: sqlite3.Connection, used: Mapping[Party, float], now: float, page: PageRange, *, show_all: bool
) -> FoldedPage:
    """Return a page of the folded queue. Without `show_all` it has only the last RECENTLY_FINISHED finished rows."""
    with one_snapshot(connection):
        queue = _FoldedQueue(connection)
        unfinished, finished = queue.count_rows()
        most = finished if show_all else min(finished, RECENTLY_FINISHED)
        rows = chain(queue.unfinished(used, now), islice(queue.finished(), most))
        return FoldedPage(list(islice(rows, page.offset, page.offset + page.count)), unfinished + most)


class _FoldedQueue:
    """One read of the queue, in the listing order of `Search.page`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._groups = _read_groups(connection)

    def unfinished(self, used: Mapping[Party, float], now: float) -> Iterator[FoldedRow]:
        seen: set[int] = set()
        for job_id, group_id in self._unfinished_jobs(used, now):
            group = None if group_id is None else self._groups.get(group_id)
            if group_id is None:
                yield FoldedRow(job_id)
            elif group_id not in seen and group is not None and group.is_complete:
                seen.add(group_id)
                yield FoldedRow(job_id, group)

    def _unfinished_jobs(self, used: Mapping[Party, float], now: float) -> Iterator[tuple[int, int | None]]:
        """Yield jobs and their groups in listing order; of a group, some."""
        for state in LIVE_IN_ORDER:
            yield from (row[:2] for row in self._skip_through(_IN_STATE, state))
        groups: dict[int, int | None] = {}
        lanes = (queue.lane for queue in JobStore(Database(self._connection)).ready_queues())

        def candidates(lane_id: int) -> Iterator[Candidate]:
            for job_id, group_id, queued_at in self._skip_through(_READY, lane_id):
                groups[job_id] = group_id
                yield Candidate(job_id=job_id, queued_at=queued_at)

        queues = [LaneQueue(lane=lane, jobs=candidates(lane.id)) for lane in lanes]
        yield from ((each.job_id, groups[each.job_id]) for each in full_order(queues, used, now))
        for state in NOT_READY:
            yield from (row[:2] for row in self._skip_through(_IN_STATE, state))

    def _skip_through(self, query: str, value: str | int) -> Iterator[tuple[int, int | None, float]]:
        """Yield the rows of a query by id, with the first job of each group in place of all of them."""
        after = 0
        while rows := self._connection.execute(query, (value, after, _PAGE)).fetchall():
            for job_id, group_id, queued_at in rows:
                if job_id > after:
                    yield job_id, group_id, queued_at
                    group = None if group_id is None else self._groups.get(group_id)
                    after = job_id if group is None else max(job_id, group.last)

    def finished(self) -> Iterator[FoldedRow]:
        """Yield what has finished as a whole, the last one first."""
        groups = [each for each in self._groups.values() if each.is_complete and each.is_finished]
        ended = sorted(((-(each.ended_at or 0.0), -each.first, each) for each in groups), key=lambda row: row[:2])
        rows = heapq.merge(self._finished_alone(), ended, key=lambda row: row[:2])
        yield from (FoldedRow(self._first_job(group) if group else -job_id, group) for _, job_id, group in rows)

    def _finished_alone(self) -> Iterator[tuple[float, int, GroupCounts | None]]:
        offset = 0
        query = (
            "SELECT id, ended_at FROM jobs INDEXED BY jobs_finished_alone WHERE ended_at IS NOT NULL "
            "AND group_id IS NULL ORDER BY ended_at DESC, id DESC LIMIT ? OFFSET ?"
        )
        while rows := self._connection.execute(query, (_PAGE, offset)).fetchall():
            yield from ((-ended_at, -job_id, None) for job_id, ended_at in rows)
            offset += len(rows)

    def _first_job(self, group: GroupCounts) -> int:
        query = "SELECT id FROM jobs WHERE id BETWEEN ? AND ? ORDER BY id LIMIT 1"
        return int(self._connection.execute(query, (group.first, group.last)).fetchone()[0])

    def count_rows(self) -> tuple[int, int]:
        """Return how many rows are unfinished, and how many are finished."""
        found = Counter[bool]()
        alone = dict(self._connection.execute("SELECT state, jobs FROM counts").fetchall())
        for group in self._groups.values():
            for state, jobs in group.counts.items():
                alone[state] -= jobs
            found[group.is_finished] += group.is_complete
        for state, jobs in alone.items():
            found[state in FINISHED] += jobs
        return found[False], found[True]


def _read_groups(
    connection: sqlite3.Connection, only: str = "", values: tuple[int, ...] = ()
) -> dict[int, GroupCounts]:
    groups: dict[int, GroupCounts] = {}
    query = (
        "SELECT group_id, last_id, is_complete, state, jobs, ended_at FROM group_counts "  # noqa: S608 - our own text
        f"JOIN submissions ON first_id = group_id WHERE jobs > 0 {only}"
    )
    for first, last, is_complete, state, jobs, ended_at in connection.execute(query, values):
        group = groups.setdefault(first, GroupCounts(first, last, is_complete=bool(is_complete)))
        group.counts[JobState(state)] = jobs
        if ended_at is not None and state in FINISHED:
            group.ended_at = max(ended_at, group.ended_at or ended_at)
    return groups


FIGURE = "figure"
# The last values by job and name. None: it was no finite number.
LiveFigures = Mapping[int, Mapping[str, float | None]]


Cell = str | float | None
T = TypeVar("T")


class TableColumn(NamedTuple):
    """`sql` is its value (`:now` is the time), `kind` how it is shown: text, seconds or figure."""

    name: str
    title: str
    sql: str
    kind: str = "text"


class TableOrder(NamedTuple):
    """The column by which runs are sorted, None for their ids; and the states that are wanted, all if empty."""

    column: str | None = None
    is_descending: bool = False
    states: tuple[JobState, ...] = ()


class TablePage(NamedTuple):
    ids: list[int]
    cells: dict[int, list[Cell]]
    total: int


class Present(NamedTuple):
    """The time, and the figures of running jobs, which are newer than those in the database."""

    now: float
    figures: LiveFigures = {}

    def cell(self, column: TableColumn, job_id: int, stored: Cell) -> Cell:
        return self.figures.get(job_id, {}).get(column.name, stored) if column.kind == FIGURE else stored


class SweepTable:
    """Reads pages over one connection."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._kept: dict[Hashable, tuple[float, Any]] = {}

    def read(
        self, job_id: int, order: TableOrder, page: PageRange, present: Present
    ) -> tuple[GroupCounts, Job, list[TableColumn], TablePage] | None:
        """Return the group of this job, one job of it, its columns and a page; None if it belongs to no group."""
        with one_snapshot(self._connection):
            group = find_group(self._connection, job_id)
            if group is None:
                return None
            store = JobStore(Database(self._connection))
            first = self._by_id(group, TableOrder(), PageRange(offset=0, count=1))
            job = store.job(first[0])
            assert job is not None
            # Names of values are identifiers, so they can be part of SQL.
            columns = [TableColumn("index", "INDEX", "array_index")] if job.index is not None else []
            values = ((name, f"json_extract(details, '$.values.{name}')") for name in job.spec.varies)
            columns += [TableColumn(name, name, sql) for name, sql in values]
            columns.append(TableColumn("state", "STATE", "state"))
            end = "CASE WHEN ended_at IS NULL THEN :now ELSE ended_at END"
            ran = TableColumn("time", "TIME", f"{end} - started_at", "seconds")
            columns += [*self._figure_columns(group, [*columns, ran], present), ran]
            if order.column is None:
                ids = self._by_id(group, order, page)
            else:
                column = next((each for each in columns if each.name == order.column), None)
                if column is None:
                    hint = f"sort by one of {', '.join(each.name for each in columns)}"
                    raise UserError(f"there is no column '{order.column}' in this sweep", hint=hint)
                every = self._keep((group.first, order), lambda: self._sorted(group, column, order, present))
                ids = every[page.offset : page.offset + page.count]
            total = sum(group.counts.get(state, 0) for state in order.states or group.counts)
            return group, job, columns, TablePage(ids, self._cells(ids, columns, present), total)

    def _figure_columns(
        self, group: GroupCounts, columns: Sequence[TableColumn], present: Present
    ) -> list[TableColumn]:
        """Return a column for each figure, the most common first. A value of the sweep, such as lr, has one already."""
        query = (
            "SELECT figures.key FROM jobs JOIN attempts ON attempts.job = jobs.id AND attempts.number = jobs.attempts "
            "JOIN json_each(attempts.usage, '$.progress.figures') AS figures WHERE jobs.id BETWEEN ? AND ? "
            "GROUP BY figures.key ORDER BY count(*) DESC, figures.key LIMIT ?"
        )
        values = (group.first, group.last, 2 * MOST_FIGURES)
        stored = self._keep(("names", group.first), lambda: [row[0] for row in self._connection.execute(query, values)])
        live = [name for job_id, on in present.figures.items() if group.first <= job_id <= group.last for name in on]
        taken = {column.name for column in columns}
        names = [name for name in dict.fromkeys([*stored, *live]) if name not in taken][:MOST_FIGURES]
        literals = ["'" + name.replace("'", "''") + "'" for name in names]
        return [
            TableColumn(
                name,
                name,
                "(SELECT json_extract(figures.value, '$.last') FROM attempts "  # noqa: S608 - quoted
                "JOIN json_each(attempts.usage, '$.progress.figures') AS figures WHERE attempts.job = jobs.id "
                f"AND attempts.number = jobs.attempts AND figures.key = {literal})",
                FIGURE,
            )
            for name, literal in zip(names, literals, strict=True)
        ]

    def _by_id(self, group: GroupCounts, order: TableOrder, page: PageRange) -> list[int]:
        query = f"SELECT id FROM jobs WHERE {_chosen(order)} ORDER BY id LIMIT :count OFFSET :offset"  # noqa: S608
        values = {"first": group.first, "last": group.last, "count": page.count, "offset": page.offset}
        return [job_id for (job_id,) in self._connection.execute(query, values)]

    def _sorted(self, group: GroupCounts, column: TableColumn, order: TableOrder, present: Present) -> list[int]:
        query = f"SELECT id, {column.sql} FROM jobs WHERE {_chosen(order)} ORDER BY id"  # noqa: S608
        values = {"first": group.first, "last": group.last, "now": present.now}
        rows = [(row[0], present.cell(column, *row)) for row in self._connection.execute(query, values)]
        # Unknown cells come last in both directions.
        known = sorted((row for row in rows if row[1] is not None), key=_sort_key, reverse=order.is_descending)
        return [row[0] for row in (*known, *(row for row in rows if row[1] is None))]

    def _keep(self, key: Hashable, read: Callable[[], T]) -> T:
        """Return what `read` returns, or what it returned for this key a while ago if that took long."""
        started = time.monotonic()
        kept_until, kept = self._kept.get(key, (0.0, None))
        if started < kept_until:
            return cast("T", kept)
        found = read()
        ended = time.monotonic()
        self._kept = {each: kept for each, kept in self._kept.items() if kept[0] > ended}
        if ended - started > 0.05:
            self._kept[key] = ended + 10.0 * (ended - started), found
        return found

    def _cells(self, ids: Sequence[int], columns: Sequence[TableColumn], present: Present) -> dict[int, list[Cell]]:
        query = f"SELECT {', '.join(column.sql for column in columns)} FROM jobs WHERE id = :id"  # noqa: S608
        return {
            job_id: [present.cell(column, job_id, cell) for column, cell in zip(columns, row, strict=True)]
            for job_id in ids
            if (row := self._connection.execute(query, {"id": job_id, "now": present.now}).fetchone()) is not None
        }


def _chosen(order: TableOrder) -> str:
    states = ", ".join(repr(str(state)) for state in order.states)
    return "id BETWEEN :first AND :last" + (f" AND state IN ({states})" if states else "")


def _sort_key(row: tuple[int, Cell]) -> tuple[int, float, str]:
    """Return a key that sorts numbers, also those that are written as text, before other texts."""
    text = str(row[1])  # never None: those are sorted separately
    try:
        number = float(text)
    except ValueError:
        return 1, 0.0, text
    return (0, number, "") if number == number else (1, 0.0, "nan")  # noqa: PLR0124 - not a number differs from itself
