"""The runs of a sweep or an array as a table that can be sorted by any column.

A column is an SQL expression over `jobs`: `table_columns` is the one place where columns are added. The figures that
runs print are columns too (`sweep_figures.py`). The order of a large sweep is kept for a while, because it takes a read
of all its jobs.
"""

import sqlite3
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from gpuyard.core.job.job import Job
from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.progress.job_progress import MOST_FIGURES
from gpuyard.errors import UserError
from gpuyard.store.database import Database
from gpuyard.store.folded_queue import GroupCounts, find_group
from gpuyard.store.job_search import PageRange, one_snapshot
from gpuyard.store.job_store import JobStore
from gpuyard.store.sweep_figures import FIGURE, LiveFigures, figure_sql, live_names, stored_names

# What took longer than _SLOW_S to read is kept for _KEEP_FACTOR times as long as that took.
_SLOW_S, _KEEP_FACTOR = 0.05, 10.0
Cell = str | float | None
T = TypeVar("T")


class TableColumn(NamedTuple):
    """`sql` is its value, for the query parameter `:now` as the time; `kind` is how it is shown: text, seconds or
    figure."""

    name: str
    title: str
    sql: str
    kind: str = "text"


class TableOrder(NamedTuple):
    """The column by which runs are sorted, None for their ids; and the states of the runs that are wanted, all if
    empty."""

    column: str | None = None
    is_descending: bool = False
    states: tuple[JobState, ...] = ()


class TablePage(NamedTuple):
    ids: list[int]
    cells: dict[int, list[Cell]]
    total: int


def table_columns(varies: Sequence[str], *, has_index: bool) -> list[TableColumn]:
    """Return the columns of a sweep over these names. Names of values are identifiers, so they can be part of SQL."""
    index = [TableColumn("index", "INDEX", "array_index")] if has_index else []
    values = [TableColumn(name, name, f"json_extract(details, '$.values.{name}')") for name in varies]
    ran = TableColumn("time", "TIME", "CASE WHEN ended_at IS NULL THEN :now ELSE ended_at END - started_at", "seconds")
    return [*index, *values, TableColumn("state", "STATE", "state"), ran]


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
            *columns, ran = table_columns(job.spec.varies, has_index=job.index is not None)
            columns += [*self._figure_columns(group, [*columns, ran], present), ran]
            return group, job, columns, self._page(group, columns, order, page, present)

    def _figure_columns(
        self, group: GroupCounts, columns: Sequence[TableColumn], present: Present
    ) -> list[TableColumn]:
        """Return a column for each figure; one that is also a value of the sweep, such as lr, has a column already."""
        stored = self._keep(("names", group.first), lambda: stored_names(self._connection, group))
        taken = {column.name for column in columns}
        names = [name for name in dict.fromkeys([*stored, *live_names(group, present.figures)]) if name not in taken]
        return [TableColumn(name, name, figure_sql(name), FIGURE) for name in names[:MOST_FIGURES]]

    def _page(
        self,
        group: GroupCounts,
        columns: Sequence[TableColumn],
        order: TableOrder,
        page: PageRange,
        present: Present,
    ) -> TablePage:
        """Return the ids and cells of a page, and the number of runs on all pages."""
        if order.column is None:
            ids = self._by_id(group, order, page)
        else:
            column = _find_column(columns, order.column)
            every = self._keep((group.first, order), lambda: self._sorted(group, column, order, present))
            ids = every[page.offset : page.offset + page.count]
        wanted = order.states or tuple(group.counts)
        total = sum(group.counts.get(state, 0) for state in wanted)
        return TablePage(ids, self._cells(ids, columns, present), total)

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
        if ended - started > _SLOW_S:
            self._kept[key] = ended + _KEEP_FACTOR * (ended - started), found
        return found

    def _cells(self, ids: Sequence[int], columns: Sequence[TableColumn], present: Present) -> dict[int, list[Cell]]:
        query = f"SELECT {', '.join(column.sql for column in columns)} FROM jobs WHERE id = :id"  # noqa: S608
        return {
            job_id: [present.cell(column, job_id, cell) for column, cell in zip(columns, row, strict=True)]
            for job_id in ids
            if (row := self._connection.execute(query, {"id": job_id, "now": present.now}).fetchone()) is not None
        }


def _find_column(columns: Sequence[TableColumn], name: str) -> TableColumn:
    column = next((each for each in columns if each.name == name), None)
    if column is None:
        names = ", ".join(each.name for each in columns)
        raise UserError(f"there is no column '{name}' in this sweep", hint=f"sort by one of {names}")
    return column


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
