"""Deletes finished jobs, with all that belongs to them alone, and gives waiting jobs another spec.

A job is kept as long as a kept job depends on it, even if that has finished: it could be retried, and would then run as
if it depended on nothing.
"""

import json
from collections.abc import Generator, Iterable, Iterator, Sequence

from msgspec.structs import replace

from gpuyard.model.job import Job
from gpuyard.model.lifecycle import WAITING, JobState
from gpuyard.store import row_codec
from gpuyard.store.database import PIECE, Database
from gpuyard.store.job_store import JobStore


class OldJobs:
    def __init__(self, database: Database, store: JobStore) -> None:
        self._db = database
        self._store = store

    def delete_ended_before(self, before: float) -> Generator[None, None, list[int]]:
        """Delete jobs that ended before this and that no other job needs; return their ids. Yields after each piece."""
        gone: list[int] = []
        while found := (yield from self._delete_once(before)):  # a job that a deleted job needed goes the next time
            gone += found
        with self._store.transaction():  # an array of a million jobs with different commands leaves a million profiles
            self._db.execute(
                "DELETE FROM profiles WHERE seen_at <= "
                "(SELECT seen_at FROM profiles ORDER BY seen_at DESC LIMIT 1 OFFSET 50000)"
            )
        return gone

    def _delete_once(self, before: float) -> Generator[None, None, list[int]]:
        gone: list[int] = []
        after = before, 0
        while page := self._page(after):
            after = page[-1]
            if deletable := self._deletable([job_id for _, job_id in page]):
                with self._store.transaction():
                    self.delete(deletable)
                gone += deletable
            yield
        return gone

    def _page(self, after: tuple[float, int]) -> list[tuple[float, int]]:
        """Return the next ends and ids, the last finished first: so jobs come before those that they depend on."""
        query = (
            "SELECT ended_at, id FROM jobs WHERE (ended_at, id) < (?, ?) AND ended_at IS NOT NULL "
            "ORDER BY ended_at DESC, id DESC LIMIT ?"
        )
        return self._db.execute(query, (*after, PIECE // 4)).fetchall()  # a job has rows in four tables

    def _deletable(self, page: Sequence[int]) -> list[int]:
        """Return those jobs of the page that no job depends on, apart from those of the page that are deleted, too."""
        if not self._store.has_dependencies:
            return list(page)
        query = "SELECT DISTINCT job FROM dependencies WHERE on_job = ? LIMIT ?"
        found: dict[int, None] = {}
        for job_id in page:
            if found.keys() >= set(self._db.column(query, (job_id, len(page)))):
                found[job_id] = None
        return list(found)

    def ended_before(self, job_ids: Sequence[int], before: float) -> set[int]:
        """Return those of these jobs that ended before then, and those that do not exist."""
        query = "SELECT id FROM jobs WHERE id IN (SELECT value FROM json_each(?)) AND (ended_at < ?) IS NOT TRUE"
        return set(job_ids) - set(self._db.column(query, (json.dumps(job_ids), before)))

    def delete(self, job_ids: Sequence[int]) -> None:
        """Delete these jobs, in a transaction, with the specs, lanes, submissions and batches that no other has."""
        among, ids = "IN (SELECT value FROM json_each(?))", (json.dumps(job_ids),)
        found = set(self._db.execute(f"SELECT spec, lane FROM jobs WHERE id {among}", ids).fetchall())  # noqa: S608
        query = (
            "SELECT (SELECT id FROM submissions WHERE first_id <= value ORDER BY first_id DESC LIMIT 1) "
            "FROM json_each(?)"
        )
        submissions = set(self._db.column(query, ids))
        for table, column in (("events", "job"), ("attempts", "job"), ("dependencies", "job"),
                              ("dependencies", "on_job"), ("changed_scripts", "job"), ("jobs", "id")):  # fmt: skip
            self._db.execute(f"DELETE FROM {table} WHERE {column} {among}", ids)  # noqa: S608
        self._store.specs.delete_unused({spec for spec, _ in found})
        self._store.delete_unused_lanes({lane for _, lane in found})
        query = (
            "SELECT id, first_id FROM submissions WHERE id = ? AND is_complete AND NOT EXISTS "
            "(SELECT 1 FROM jobs WHERE jobs.id BETWEEN first_id AND last_id)"
        )
        empty = [row for each in submissions for row in self._db.execute(query, (each,)).fetchall()]
        self._db.executemany("DELETE FROM submissions WHERE id = ?", [(number,) for number, _ in empty])
        self._db.executemany("DELETE FROM batches WHERE first_id = ?", [(first,) for _, first in empty])


class JobEdits:
    """The edits of one request: jobs that were alike stay so, and their lane is looked up once."""

    def __init__(self, database: Database, store: JobStore) -> None:
        self._db = database
        self._store = store
        self.add_spec, self.delete_unused_specs = store.specs.add, store.specs.delete_unused
        self._lanes: dict[tuple[int, int, bool], int] = {}  # by the new spec, the old lane, and whether sizes differ

    def spec_of(self, job_id: int) -> int:
        """Return the number of the job's spec."""
        return int(self._db.value("SELECT spec FROM jobs WHERE id = ?", (job_id,)))

    def one_of_each_spec(self, ranges: Iterable[tuple[int, int]]) -> Iterator[Job]:
        """Yield a waiting job of each spec in these ranges of ids."""
        waiting = ", ".join(f"'{state}'" for state in sorted(WAITING))
        query = f"SELECT min(id) FROM jobs WHERE id BETWEEN ? AND ? AND state IN ({waiting}) GROUP BY spec"  # noqa: S608
        for each in ranges:
            for job_id in self._db.column(query, each):
                if (job := self._store.job(job_id)) is not None:
                    yield job

    def replace_spec(self, job: Job, spec_id: int, *, drops_growth: bool) -> None:
        """Store the spec and the priority that `job` has now. Call it in a transaction."""
        sizes_each = bool(job.growth.count) and not drops_growth
        before = self._store.lane_of(job.id)
        key = spec_id, before.id, sizes_each
        if key not in self._lanes:
            batch = before.batch if before.batch in self._store.arriving else None  # as long as it must not start
            lane = row_codec.lane_of(job, batch)
            self._lanes[key] = self._store.ensure_lane(replace(lane, sizes_each=lane.sizes_each or sizes_each))
        row = (spec_id, self._lanes[key], job.priority, job.spec.name, job.spec.tag, job.id)
        growth = ", growth = NULL" if drops_growth else ""
        query = f"UPDATE jobs SET spec = ?, lane = ?, priority = ?, name = ?, tag = ?{growth} WHERE id = ?"  # noqa: S608
        self._db.execute(query, row)

    def set_start(self, job_id: int, not_before: float | None) -> None:
        """Store the earliest start; of a delayed job, also when it is due."""
        due_at = f"CASE WHEN state = '{JobState.DELAYED}' THEN ?1 END"
        self._db.execute(f"UPDATE jobs SET not_before = ?1, due_at = {due_at} WHERE id = ?2", (not_before, job_id))  # noqa: S608
