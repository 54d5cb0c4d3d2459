"""Search: find jobs by state, text, tag, user or id, and return one page of them, in listing order or by a column.

A search runs on a connection and in a thread of its own. Nearly all of its work is done by SQLite, which releases
Python's global lock meanwhile. SQL cannot compute the queue order over several lanes: it is computed once for many
pages and kept in a temporary table of this connection."""

import contextlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from gpuyard.model.lifecycle import FINISHED, WAITING, JobState
from gpuyard.model.selection import JobSelection
from gpuyard.policy.queue_order import Candidate, LaneQueue, Party, full_order
from gpuyard.store import queue_queries as queries
from gpuyard.store.database import Database
from gpuyard.store.job_store import JobStore
from gpuyard.store.queue_queries import IN_RANGES, among

LIVE_IN_ORDER = (
    JobState.RUNNING, JobState.RESUMING, JobState.STOPPING, JobState.PENDING, JobState.SUSPENDING, JobState.SUSPENDED,
)  # fmt: skip
NOT_READY = (JobState.HELD, JobState.DELAYED, JobState.BLOCKED)


def _rank(*states: JobState) -> str:
    """Return the place of a job's state among these as an SQL expression."""
    ranks = " ".join(f"WHEN '{state}' THEN {rank}" for rank, state in enumerate(states))
    return f"CASE state {ranks} ELSE 100 END"


_LAST_ATTEMPT = "FROM attempts WHERE attempts.job = jobs.id ORDER BY number DESC LIMIT 1"
SORT_VALUES = {
    "id": "jobs.id",
    "state": _rank(
        *LIVE_IN_ORDER, JobState.QUEUED, JobState.DELAYED, JobState.BLOCKED, JobState.HELD,
        JobState.FAILED, JobState.REJECTED, JobState.SUCCEEDED, JobState.CANCELLED,
    ),
    "name": "coalesce(jobs.name, jobs.command, (SELECT specs.command FROM specs WHERE specs.id = spec)) COLLATE NOCASE",
    "reason": "nullif(jobs.reason, '') COLLATE NOCASE",
    "gpu": f"(SELECT devices {_LAST_ATTEMPT})",
    "memory": f"(SELECT reserved_mb {_LAST_ATTEMPT})",
    "priority": "priority",
    # As the list shows it: the run time, or the waiting time of a job that has not started.
    "time": f"CASE WHEN {among(sorted(WAITING))} THEN :now - jobs.submitted_at "
    "ELSE coalesce(jobs.ended_at, :now) - jobs.started_at END",
}  # fmt: skip


RECENTLY_FINISHED = 10
_MATCHES_TEXT = r"""(
    name LIKE :text ESCAPE '\' OR tag LIKE :text ESCAPE '\' OR jobs.id = :id
    OR jobs.command LIKE :text ESCAPE '\' OR jobs.command LIKE :unquoted ESCAPE '\'
    OR jobs.command IS NULL AND spec IN (
        SELECT id FROM specs WHERE specs.command LIKE :text ESCAPE '\' OR specs.command LIKE :unquoted ESCAPE '\'
    )
)"""


class JobFilter(Struct, frozen=True, kw_only=True):
    """Conditions that a job must all meet; an empty one is met by every job. `search` is part of the name, tag or
    command, or is the id. `ranges` are first and last ids; None means any id."""

    states: tuple[JobState, ...] = ()
    search: str = ""
    tag: str = ""
    user: str = ""
    ranges: tuple[tuple[int, int], ...] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it has no condition other than states."""
        return not (self.search or self.tag or self.user or self.ranges is not None)


class PageRange(Struct, frozen=True, kw_only=True):
    """The part of a list that a page shows."""

    offset: int
    count: int


class Section(NamedTuple):
    """A part of a list: its size, and a function that returns its ids for an offset and a count."""

    size: int
    ids: Callable[[int, int], list[int]]


class SearchResult(Struct, frozen=True, kw_only=True):
    """The ids of a page, and the number of jobs on all pages."""

    ids: list[int]
    total: int


@contextlib.contextmanager
def one_snapshot(connection: sqlite3.Connection) -> Iterator[None]:
    """Let all reads of the block see the same state of the database."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        connection.execute("COMMIT")


class Search:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self._execute = connection.execute
        self._order = _QueueOrder(connection)

    def page(
        self, job_filter: JobFilter, used: Mapping[Party, float], now: float, page: PageRange, *, show_all: bool
    ) -> SearchResult:
        """Return a page in listing order: live jobs, queued jobs in queue order, other waiting jobs, finished jobs with
        the last first; without `show_all` and without conditions, only the last RECENTLY_FINISHED of these."""
        with one_snapshot(self.connection):
            if job_filter.ranges is not None:
                return self._matching(job_filter, page, "", "ORDER BY jobs.id")
            has_queued = not job_filter.states or JobState.QUEUED in job_filter.states
            if has_queued:
                self._order.update(JobStore(Database(self.connection)).ready_queues(), used, now)
            if job_filter.is_plain:
                return _cut(list(self._sections(job_filter, show_all=show_all)), page)
            joined = rank = ""
            if has_queued and not self._order.is_single_lane:
                # A job that has started since the order was computed still has a rank.
                joined = "LEFT JOIN queue_order USING (id)"
                rank = "CASE WHEN state = 'queued' THEN queue_order.rank END, "
            order = (
                f"ORDER BY {_rank(*LIVE_IN_ORDER, JobState.QUEUED, *NOT_READY)}, {rank}"
                "CASE WHEN jobs.ended_at IS NULL THEN jobs.id END, jobs.ended_at DESC, jobs.id DESC"
            )
            return self._matching(job_filter, page, joined, order)

    def newest(self, job_filter: JobFilter, page: PageRange) -> SearchResult:
        """Return a page with the newest submissions first."""
        with one_snapshot(self.connection):
            if not job_filter.is_plain:
                return self._matching(job_filter, page, "", "ORDER BY jobs.id DESC")
            states = job_filter.states or tuple(JobState)
            return _cut([self._section(f"jobs WHERE {among(states)} ORDER BY id DESC", states)], page)

    def sorted(self, job_filter: JobFilter, page: PageRange, order: str, now: float) -> SearchResult:
        """Return a page in an order by a column, such as `-time`; of equal values the newest jobs come first."""
        value, direction = SORT_VALUES[order.removeprefix("-")], "DESC" if order.startswith("-") else "ASC"
        clause = f"ORDER BY ({value}) IS NULL, {value} {direction}, jobs.id DESC"
        with one_snapshot(self.connection):
            return self._matching(job_filter, page, "", clause, now=now)

    def ranges(self, job_filter: JobFilter) -> list[tuple[int, int]]:
        """Return the ids of all matching jobs as pairs of first and last."""
        with one_snapshot(self.connection):
            where, values = self._where(job_filter)
            return [(first, last) for first, last in self._execute(queries.range_query([where]), values)]

    def selected_ranges(self, selection: JobSelection) -> list[tuple[int, int]]:
        """Return the ids of all selected jobs as pairs of first and last, without those that are being submitted."""
        with one_snapshot(self.connection):
            clauses, values = queries.selection_conditions(selection)
            query = queries.range_query([*clauses, queries.SUBMISSION_IS_COMPLETE])
            return [(first, last) for first, last in self._execute(query, values)]

    def empty_range(self, ranges: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
        """Return the first of these ranges of ids in which no job is."""
        found: tuple[int, int] | None = self._execute(queries.EMPTY_RANGE, (json.dumps(ranges),)).fetchone()
        return found

    def count_states(self, ranges: Sequence[tuple[int, int]]) -> dict[JobState, int]:
        """Return the number of jobs with these ids in each state."""
        query = f"SELECT state, count(*) FROM jobs WHERE {IN_RANGES} GROUP BY state"  # noqa: S608 - our own text
        found = self._execute(query, {"ranges": json.dumps(ranges)})
        return {JobState(state): count for state, count in found}

    def _matching(
        self, job_filter: JobFilter, page: PageRange, joined: str, order: str, **more: object
    ) -> SearchResult:
        where, values = self._where(job_filter)
        values |= {"count": page.count, "offset": page.offset, **more}
        chosen = f"FROM jobs {joined} WHERE {where}"
        query = f"SELECT jobs.id, count(*) OVER () {chosen} {order} LIMIT :count OFFSET :offset"
        rows = self._execute(query, values).fetchall()
        if not rows and page.offset:
            total = self._execute(f"SELECT count(*) {chosen}", values).fetchone()[0]
            return SearchResult(ids=[], total=total)
        return SearchResult(ids=[job_id for job_id, _ in rows], total=rows[0][1] if rows else 0)

    def _where(self, job_filter: JobFilter) -> tuple[str, dict[str, object]]:
        clauses = [among(job_filter.states)] if job_filter.states else []
        values: dict[str, object] = {}
        if job_filter.ranges is None:
            clauses.append(queries.SUBMISSION_IS_COMPLETE)
        else:
            clauses.append(IN_RANGES)
            values["ranges"] = json.dumps(job_filter.ranges)
        for column, value in (("tag", job_filter.tag), ("user", job_filter.user)):
            if value:
                clauses.append(f"jobs.{column} = :{column} AND jobs.{column} <> ''")
                values[column] = value
        if job_filter.search:
            text = job_filter.search
            clauses.append(_MATCHES_TEXT)
            is_id = text.isascii() and text.isdecimal() and len(text) < 19
            values["id"] = int(text) if is_id else None
            # Commands are also matched without quotes: the user may have copied some that only the display added.
            values |= {"text": _contains(text), "unquoted": _contains(text.replace("'", ""))}
        return " AND ".join(clauses), values

    def _sections(self, job_filter: JobFilter, *, show_all: bool) -> Iterator[Section]:
        states = job_filter.states or tuple(JobState)
        for state in LIVE_IN_ORDER:
            yield self._not_queued([state] if state in states else [])
        if JobState.QUEUED in states:
            yield self._order.section()
        yield self._not_queued([state for state in NOT_READY if state in states])
        finished = [state for state in states if state in FINISHED]
        source = f"jobs INDEXED BY jobs_finished WHERE ended_at IS NOT NULL AND {among(finished)}"
        section = self._section(f"{source} ORDER BY ended_at DESC, id DESC", finished)
        most = section.size if show_all or job_filter.states else RECENTLY_FINISHED
        yield section._replace(size=min(most, section.size))

    def _not_queued(self, states: Sequence[JobState]) -> Section:
        source = f"jobs INDEXED BY jobs_not_queued WHERE ended_at IS NULL AND state <> 'queued' AND {among(states)}"
        return self._section(f"{source} ORDER BY state DESC, id", states)

    def _section(self, source: str, states: Sequence[JobState]) -> Section:
        query = f"SELECT id FROM {source} LIMIT ? OFFSET ?"  # noqa: S608
        counts = dict(self._execute("SELECT state, jobs FROM counts").fetchall())
        size = sum(counts[state] for state in states)
        return Section(size, lambda offset, count: [row[0] for row in self._execute(query, (count, offset))])


class _QueueOrder:
    """The queue order of all queued jobs, cached until the database changes or the order is too old."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._execute = connection.execute
        self._insert = connection.executemany
        self._queues: Sequence[LaneQueue] = ()
        self._version: int | None = None
        self._computed_at = self._took_s = 0.0
        self._execute("PRAGMA temp_store = MEMORY")
        self._execute("CREATE TEMP TABLE queue_order (id INTEGER PRIMARY KEY, rank INTEGER NOT NULL UNIQUE)")

    def update(self, queues: Sequence[LaneQueue], used: Mapping[Party, float], now: float) -> None:
        self._queues = queues
        version = self._execute("PRAGMA data_version").fetchone()[0]
        age = time.monotonic() - self._computed_at
        is_current = version == self._version and age < 5.0  # it changes with time
        is_too_slow = self._took_s > 0.05 and age < 4.0 * self._took_s  # then it is kept even if the queue changes
        if self.is_single_lane or is_current or is_too_slow:
            return
        self._version, started = None, time.monotonic()
        self._execute("DELETE FROM queue_order")
        self._insert("INSERT INTO queue_order VALUES (?, ?)", _with_pauses(full_order(queues, used, now)))
        self._version, self._computed_at = version, time.monotonic()
        self._took_s = self._computed_at - started

    @property
    def is_single_lane(self) -> bool:
        """Whether all queued jobs are in one lane: the queue order is then the order of ids."""
        return len(self._queues) <= 1

    def section(self) -> Section:
        query = "SELECT count(*) FROM jobs INDEXED BY jobs_ready WHERE state = 'queued' AND lane = ?"
        size = sum(self._execute(query, (queue.lane.id,)).fetchone()[0] for queue in self._queues)
        return Section(size, self._ids)

    def _ids(self, offset: int, count: int) -> list[int]:
        if self.is_single_lane:
            query = (
                "SELECT id FROM jobs INDEXED BY jobs_ready WHERE state = 'queued' AND lane = ? "
                "ORDER BY id LIMIT ? OFFSET ?"
            )
            return [row[0] for row in self._execute(query, (self._queues[0].lane.id, count, offset))]
        query = "SELECT id FROM queue_order WHERE rank >= ? ORDER BY rank LIMIT ?"
        return [row[0] for row in self._execute(query, (offset, count))]


def _with_pauses(candidates: Iterator[Candidate]) -> Iterator[tuple[int, int]]:
    """Sleep briefly now and then: other threads wait 5 ms for Python's global lock unless its holder sleeps."""
    for rank, candidate in enumerate(candidates):
        if rank % 200 == 199:
            time.sleep(0.0005)
        yield candidate.job_id, rank


def _cut(sections: Sequence[Section], page: PageRange) -> SearchResult:
    """Return the page of the sections one after the other."""
    ids: list[int] = []
    start = 0
    for section in sections:
        first, last = max(page.offset, start), min(page.offset + page.count, start + section.size)
        if first < last:
            ids += section.ids(first - start, last - first)
        start += section.size
    return SearchResult(ids=ids, total=start)


def _contains(text: str) -> str:
    """Return the LIKE pattern for values that contain `text`; wildcards in `text` stand for themselves."""
    escaped = text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return f"%{escaped}%"
