"""QueueQueries: the queries of users about the queue, and the jobs that they select, in SQL. OldJobs deletes finished
jobs, with all that belongs to them alone. JobEdits gives waiting jobs another spec."""

import json
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from gpuyard.model.job import Job
from gpuyard.model.lifecycle import WAITING, JobState
from gpuyard.model.selection import MOST_RANGES, JobSelection, merge_ranges
from gpuyard.policy.estimates import Profile
from gpuyard.store import row_codec
from gpuyard.store.database import PIECE, Database
from gpuyard.store.job_store import JobStore

IN_RANGES = (
    "jobs.id IN (SELECT selected.id FROM json_each(:ranges) CROSS JOIN jobs AS selected "
    "ON selected.id BETWEEN json_extract(value, '$[0]') AND json_extract(value, '$[1]'))"
)

# The first range of ids in which no job is.
EMPTY_RANGE = (
    "SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]') FROM json_each(?) WHERE NOT EXISTS "
    "(SELECT 1 FROM jobs WHERE id BETWEEN json_extract(value, '$[0]') AND json_extract(value, '$[1]')) LIMIT 1"
)


def selection_conditions(selection: JobSelection) -> tuple[list[str], dict[str, object]]:
    """Return the conditions that a row of `jobs` has to meet, and their parameters."""
    clauses: list[str] = []
    values: dict[str, object] = {}
    if selection.ranges:
        clauses.append(IN_RANGES)
        values["ranges"] = json.dumps(selection.ranges)
    if selection.states:
        clauses.append(among(selection.states))
    for column, wanted in (("name", selection.names), ("tag", selection.tags), ("user", selection.users)):
        if wanted:
            # The second condition lets SQLite use the partial indexes, which leave out empty names and tags.
            chosen = f"jobs.{column} IN (SELECT value FROM json_each(:{column}s))"  # noqa: S608 - our own names
            clauses.append(f"{chosen} AND jobs.{column} <> ''")
            values[f"{column}s"] = json.dumps(wanted)
    if selection.since:
        assert selection.since_at is not None
        clauses.append("(jobs.submitted_at >= :since OR jobs.ended_at >= :since)")
        values["since"] = selection.since_at
    return clauses, values


def range_query(clauses: Sequence[str]) -> str:
    """Return the query for the first and the last id of each unbroken run of matching ids."""
    return (
        "SELECT min(id), max(id) FROM (SELECT jobs.id, jobs.id - row_number() OVER (ORDER BY jobs.id) AS island "  # noqa: S608
        f"FROM jobs WHERE {' AND '.join(clauses) or 'true'}) GROUP BY island ORDER BY 1"
    )


def among(states: Sequence[JobState]) -> str:
    return f"state IN ({', '.join(repr(str(state)) for state in states)})"


# Jobs of an incomplete submission are in a lane of their own.
SUBMISSION_IS_COMPLETE = (
    "lane NOT IN (SELECT id FROM lanes WHERE json_extract(body, '$.batch') IN "
    "(SELECT id FROM submissions WHERE NOT is_complete))"
)
_read_profile = msgspec.json.Decoder(Profile).decode


class QueueQueries:
    def __init__(self, database: Database, store: JobStore) -> None:
        self._execute, self._value, self._column = database.execute, database.value, database.column
        self._store = store
        self.old_jobs = OldJobs(database, store)

    def last_id(self) -> int:
        """Return the highest id that any job ever got."""
        return int(self._store.setting("next_id") or 1) - 1

    def latest_time(self) -> float | None:
        """Return the latest time at which anything was recorded, or None in a new queue."""
        queries = (
            "SELECT submitted_at FROM jobs ORDER BY id DESC LIMIT 1",
            "SELECT max(ended_at) FROM jobs WHERE ended_at IS NOT NULL",
            "SELECT max(coalesce(started_at, handed_over_at)) FROM attempts WHERE ended_at IS NULL",
            "SELECT at FROM events ORDER BY id DESC LIMIT 1",
            "SELECT max(at) FROM uses",
        )
        return max(filter(None, map(self._value, queries)), default=None)

    def ranges(self, selection: JobSelection) -> list[tuple[int, int]]:
        """Return the selected ids as pairs of first and last, in order, up to the last id."""
        last_id = self.last_id()
        if selection.has_conditions:
            clauses, values = selection_conditions(selection)
            query = f"SELECT jobs.id FROM jobs WHERE {' AND '.join(clauses)}"  # noqa: S608 - our own text
            return _to_ranges(job_id for (job_id,) in self._execute(query, values).fetchall())
        found = selection.ranges or (((1, last_id),) if selection.is_all else ())
        return merge_ranges((first, min(last, last_id)) for first, last in found if first <= last_id)

    def empty_range(self, ranges: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
        """Return the first of these ranges of ids in which no job is."""
        found: tuple[int, int] | None = self._execute(EMPTY_RANGE, (json.dumps(ranges),)).fetchone()
        return found

    def ids(self, first: int, last: int, states: Sequence[JobState] | None = None, limit: int = 1000) -> Iterator[int]:
        """Yield the ids of existing jobs in order, fetched `limit` at a time."""
        only = "" if states is None else f" AND {among(states)}"
        query = f"SELECT id FROM jobs WHERE id BETWEEN ? AND ?{only} ORDER BY id LIMIT ?"  # noqa: S608
        while found := self._column(query, (first, last, limit)):
            yield from found
            first = found[-1] + 1

    def has_any(self, first: int, last: int, states: Sequence[JobState]) -> bool:
        """Return whether a job of this range of ids is in one of these states."""
        return next(self.ids(first, last, states, limit=1), None) is not None

    def first_unfinished(self, first: int, last: int) -> int | None:
        query = "SELECT id FROM jobs WHERE id BETWEEN ? AND ? AND ended_at IS NULL ORDER BY id LIMIT 1"
        job_id: int | None = self._value(query, (first, last))
        return job_id

    def unfinished(self) -> list[tuple[int, int]]:
        """Return the ids of unfinished jobs as ranges; of very many one range, with finished jobs in between."""
        found: list[int] = []
        for where in ("INDEXED BY jobs_ready WHERE state = 'queued'",
                      "INDEXED BY jobs_not_queued WHERE ended_at IS NULL AND state <> 'queued'"):  # fmt: skip
            found += self._column(f"SELECT id FROM jobs {where} LIMIT 20000")  # noqa: S608 - a few milliseconds
        ranges = _to_ranges(found)
        if len(found) < 20_000 and len(ranges) <= MOST_RANGES:
            return ranges
        return [(self.first_unfinished(1, self.last_id()) or 1, self.last_id())]

    def profiles(self, limit: int) -> list[tuple[str, Profile]]:
        """Return fingerprints and profiles, the last used first."""
        query = "SELECT fingerprint, body FROM profiles ORDER BY seen_at DESC, fingerprint LIMIT ?"
        return [(fingerprint, _read_profile(body)) for fingerprint, body in self._execute(query, (limit,)).fetchall()]

    def profiles_after(self, fingerprint: str, limit: int) -> list[tuple[str, Profile]]:
        """Return the next fingerprints in order, with their profiles."""
        query = "SELECT fingerprint, body FROM profiles WHERE fingerprint > ? ORDER BY fingerprint LIMIT ?"
        return [(each, _read_profile(body)) for each, body in self._execute(query, (fingerprint, limit)).fetchall()]

    def delete_profiles(self, fingerprints: Sequence[str] | None) -> int:
        """Delete these profiles (None: all) and return how many there were. Call it in a transaction."""
        if fingerprints is None:
            return self._execute("DELETE FROM profiles").rowcount
        query = "DELETE FROM profiles WHERE fingerprint = ?"
        return sum(self._execute(query, (each,)).rowcount for each in fingerprints)

    def count_in(self, ranges: Sequence[tuple[int, int]], state: JobState) -> int:
        query = "SELECT count(*) FROM jobs WHERE id BETWEEN ? AND ? AND state = ?"
        return sum(self._value(query, (first, last, state)) for first, last in ranges)

    def counts_in(self, first: int, last: int) -> dict[JobState, int]:
        query = "SELECT state, count(*) FROM jobs WHERE id BETWEEN ? AND ? GROUP BY state"
        return {JobState(state): count for state, count in self._execute(query, (first, last)).fetchall()}

    def jobs_in(self, first: int, last: int, limit: int) -> list[Job]:
        """Return the first jobs of the range, by id."""
        return self._jobs("WHERE id BETWEEN ? AND ? ORDER BY id LIMIT ?", (first, last, limit))

    def with_ids(self, job_ids: Sequence[int]) -> dict[int, Job]:
        """Return those of these jobs that exist, by id."""
        jobs = self._jobs("WHERE id IN (SELECT value FROM json_each(?))", (json.dumps(job_ids),))
        return {job.id: job for job in jobs}

    def has_groups(self) -> bool:
        """Return whether any job belongs to an array or a sweep."""
        return self._value("SELECT 1 FROM group_counts WHERE jobs > 0 LIMIT 1") is not None

    def with_tag(self, tag: str, limit: int) -> list[Job]:
        """Return the newest jobs with this tag, by id."""
        return self._jobs("WHERE tag = ? ORDER BY id DESC LIMIT ?", (tag, limit))[::-1]

    def submission_of(self, first_id: int) -> tuple[int, int, str | None] | None:
        """Return the first id, last id and token of the complete submission that starts with this job."""
        query = "SELECT first_id, last_id, token FROM submissions WHERE first_id = ? AND is_complete"
        found: tuple[int, int, str | None] | None = self._execute(query, (first_id,)).fetchone()
        return found

    def in_state(self, states: Sequence[JobState], limit: int, offset: int = 0) -> list[Job]:
        """Return jobs in these states, by state and id. The states must be unfinished ones other than queued."""
        chosen = f"{among(states)} AND ended_at IS NULL AND state <> 'queued'"
        if self._store.arriving:
            chosen += f" AND {SUBMISSION_IS_COMPLETE}"
        query = f"INDEXED BY jobs_not_queued WHERE {chosen} ORDER BY state DESC, id LIMIT ? OFFSET ?"
        return self._jobs(query, (limit, offset))

    def finished(self, limit: int, offset: int = 0) -> list[Job]:
        """Return finished jobs, the last finished first."""
        return self._jobs("WHERE ended_at IS NOT NULL ORDER BY ended_at DESC LIMIT ? OFFSET ?", (limit, offset))

    def events(self, job_id: int) -> list[tuple[float, str, str | None]]:
        """Return the job's history: time, kind and text of each event."""
        query = "SELECT at, kind, text FROM events WHERE job = ? ORDER BY id"
        return self._execute(query, (job_id,)).fetchall()

    def independent_jobs(
        self, job_ids: Sequence[int], states: Sequence[JobState], *, unnamed_only: bool, ready_at: float | None = None
    ) -> list[int]:
        """Return those of these jobs that are in one of the states and have no part in a dependency; with `ready_at`,
        only those that may start by then."""
        only = " AND name IS NULL" if unnamed_only else ""
        if ready_at is not None:
            only += f" AND (not_before IS NULL OR not_before <= {ready_at!r})"
        if self._store.has_dependencies:
            only += (
                " AND NOT EXISTS (SELECT 1 FROM dependencies WHERE job = jobs.id)"
                " AND NOT EXISTS (SELECT 1 FROM dependencies WHERE on_job = jobs.id)"
            )
        query = (
            "SELECT id FROM jobs WHERE id IN (SELECT value FROM json_each(?)) "  # noqa: S608 - our own text
            f"AND state IN (SELECT value FROM json_each(?)){only} ORDER BY id"
        )
        return self._column(query, (json.dumps(job_ids), json.dumps(states)))

    def _jobs(self, chosen: str, parameters: tuple[Any, ...]) -> list[Job]:
        rows = self._execute(f"SELECT {row_codec.JOB_COLUMNS} FROM jobs {chosen}", parameters).fetchall()  # noqa: S608
        return [row_codec.job_from_row(row, self._store.spec(row[1])) for row in rows]


def _to_ranges(ids: Iterable[int]) -> list[tuple[int, int]]:
    """Return ids as pairs of first and last. There may be very many, and few ranges: no pair is made for each id."""
    ranges: list[tuple[int, int]] = []
    first = last = None
    for job_id in sorted(ids):
        if first is None or last is None or job_id > last + 1:
            if first is not None and last is not None:
                ranges.append((first, last))
            first = job_id
        last = job_id
    return ranges if first is None or last is None else [*ranges, (first, last)]


class OldJobs:
    """A job is kept as long as a kept job depends on it, even if that has finished: it could be retried, and would then
    run as if it depended on nothing."""

    def __init__(self, database: Database, store: JobStore) -> None:
        self._db, self._store = database, store

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
        self._db, self._store = database, store
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
