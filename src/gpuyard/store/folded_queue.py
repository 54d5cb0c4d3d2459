"""FoldedQueue: the queue with one row for each array or sweep, and for each job that belongs to none.

Jobs of a group have consecutive ids, from its own id up to the last id of its submission. So the next row behind a
group is found by its last id, and the cost of a page does not grow with the size of groups. Their counts are kept by
triggers (`schema.sql`).
"""

import heapq
import sqlite3
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import NamedTuple

from gpuyard.core.job.lifecycle import FINISHED, JobState
from gpuyard.core.scheduling.queue_order import Candidate, LaneQueue, Party, full_order
from gpuyard.store.database import Database
from gpuyard.store.job_search import LIVE_IN_ORDER, NOT_READY, RECENTLY_FINISHED, PageRange, one_snapshot
from gpuyard.store.job_store import JobStore

_PAGE = 64
_IN_STATE = (
    "SELECT id, group_id, 0 FROM jobs INDEXED BY jobs_not_queued "
    "WHERE state = ? AND ended_at IS NULL AND state <> 'queued' AND id > ? ORDER BY id LIMIT ?"
)
_READY = (
    "SELECT id, group_id, coalesce(queued_at, submitted_at) FROM jobs INDEXED BY jobs_ready "
    "WHERE state = 'queued' AND lane = ? AND id > ? ORDER BY id LIMIT ?"
)
_FINISHED_ALONE = (
    "SELECT id, ended_at FROM jobs INDEXED BY jobs_finished_alone WHERE ended_at IS NOT NULL AND group_id IS NULL "
    "ORDER BY ended_at DESC, id DESC LIMIT ? OFFSET ?"
)
_GROUPS = (
    "SELECT group_id, last_id, is_complete, state, jobs, ended_at FROM group_counts "
    "JOIN submissions ON first_id = group_id WHERE jobs > 0"
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

    def add(self, state: JobState, jobs: int, ended_at: float | None) -> None:
        self.counts[state] = jobs
        if ended_at is not None and state in FINISHED:
            self.ended_at = max(ended_at, self.ended_at or ended_at)


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
        return FoldedQueue(connection).page(used, now, page, show_all=show_all)


class FoldedQueue:
    """One read of the queue, in the listing order of `Search.page`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._groups = _read_groups(connection)

    def page(self, used: Mapping[Party, float], now: float, page: PageRange, *, show_all: bool) -> FoldedPage:
        counts = self._count_rows()
        finished = counts.pop("finished")
        most = finished if show_all else min(finished, RECENTLY_FINISHED)
        rows = chain(self._unfinished(used, now), islice(self._finished(), most))
        return FoldedPage(list(islice(rows, page.offset, page.offset + page.count)), counts["unfinished"] + most)

    def _unfinished(self, used: Mapping[Party, float], now: float) -> Iterator[FoldedRow]:
        seen: set[int] = set()
        for job_id, group_id in self._unfinished_jobs(used, now):
            if group_id is None:
                yield FoldedRow(job_id)
            elif group_id not in seen:
                seen.add(group_id)
                group = self._groups.get(group_id)
                if group is not None and group.is_complete:
                    yield FoldedRow(job_id, group)

    def _unfinished_jobs(self, used: Mapping[Party, float], now: float) -> Iterator[tuple[int, int | None]]:
        """Yield jobs and their groups in listing order; of a group, some."""
        for state in LIVE_IN_ORDER:
            yield from (row[:2] for row in self._skip_through(_IN_STATE, state))
        groups: dict[int, int | None] = {}
        lanes = (queue.lane for queue in JobStore(Database(self._connection)).ready_queues())
        queues = [LaneQueue(lane=lane, jobs=self._candidates(lane.id, groups)) for lane in lanes]
        yield from ((each.job_id, groups[each.job_id]) for each in full_order(queues, used, now))
        for state in NOT_READY:
            yield from (row[:2] for row in self._skip_through(_IN_STATE, state))

    def _candidates(self, lane_id: int, groups: dict[int, int | None]) -> Iterator[Candidate]:
        for job_id, group_id, queued_at in self._skip_through(_READY, lane_id):
            groups[job_id] = group_id
            yield Candidate(job_id=job_id, queued_at=queued_at)

    def _skip_through(self, query: str, value: str | int) -> Iterator[tuple[int, int | None, float]]:
        """Yield the rows of a query by id, with the first job of each group in place of all of them."""
        after = 0
        while rows := self._connection.execute(query, (value, after, _PAGE)).fetchall():
            for job_id, group_id, queued_at in rows:
                if job_id > after:
                    yield job_id, group_id, queued_at
                    group = None if group_id is None else self._groups.get(group_id)
                    after = job_id if group is None else max(job_id, group.last)

    def _finished(self) -> Iterator[FoldedRow]:
        """Yield what has finished as a whole, the last one first."""
        groups = [each for each in self._groups.values() if each.is_complete and each.is_finished]
        ended = sorted(((-(each.ended_at or 0.0), -each.first, each) for each in groups), key=lambda row: row[:2])
        rows = heapq.merge(self._finished_alone(), ended, key=lambda row: row[:2])
        yield from (FoldedRow(self._first_job(group) if group else -job_id, group) for _, job_id, group in rows)

    def _finished_alone(self) -> Iterator[tuple[float, int, GroupCounts | None]]:
        offset = 0
        while rows := self._connection.execute(_FINISHED_ALONE, (_PAGE, offset)).fetchall():
            yield from ((-ended_at, -job_id, None) for job_id, ended_at in rows)
            offset += len(rows)

    def _first_job(self, group: GroupCounts) -> int:
        query = "SELECT id FROM jobs WHERE id BETWEEN ? AND ? ORDER BY id LIMIT 1"
        return int(self._connection.execute(query, (group.first, group.last)).fetchone()[0])

    def _count_rows(self) -> dict[str, int]:
        found = {"unfinished": 0, "finished": 0}
        alone = dict(self._connection.execute("SELECT state, jobs FROM counts").fetchall())
        for group in self._groups.values():
            for state, jobs in group.counts.items():
                alone[state] -= jobs
            if group.is_complete:
                found["finished" if group.is_finished else "unfinished"] += 1
        for state, jobs in alone.items():
            found["finished" if state in FINISHED else "unfinished"] += jobs
        return found


def _read_groups(
    connection: sqlite3.Connection, only: str = "", values: tuple[int | None, ...] = ()
) -> dict[int, GroupCounts]:
    groups: dict[int, GroupCounts] = {}
    for first, last, is_complete, state, jobs, ended_at in connection.execute(f"{_GROUPS} {only}", values):
        group = groups.setdefault(first, GroupCounts(first, last, is_complete=bool(is_complete)))
        group.add(JobState(state), jobs, ended_at)
    return groups
