"""Catalogue: what people ask of the queue, in SQL: which jobs are meant, what stands where, what may be forgotten."""

from collections.abc import Iterator, Sequence
from typing import Any

from gpuyard.core.job.job import Job
from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.job.selection import JobSelection, merge_ranges
from gpuyard.core.memory.estimates import Profile
from gpuyard.store import row_codec
from gpuyard.store.database import Database
from gpuyard.store.job_store import JobStore

# What fits into a line of a request, and what can be looked through in a few milliseconds.
_MOST_STRETCHES, _MOST_APART = 500, 20_000
# An array of a million leaves as many fingerprints behind.
_MOST_PROFILES = 50_000


class QueueQueries:
    def __init__(self, database: Database, store: JobStore) -> None:
        self._db = database
        self._execute = database.execute
        self._store = store

    def last_id(self) -> int:
        """The highest id that was given out."""
        return int(self._store.setting("next_id") or 1) - 1

    def ranges(self, selection: JobSelection) -> list[tuple[int, int]]:
        """The ids that are meant, as first and last of each stretch, in order; only such as may exist."""
        found = [(first, min(last, self.last_id())) for first, last in selection.ranges]
        if selection.is_all:
            found.append((1, self.last_id()))
        for column, wanted in (("name", selection.names), ("tag", selection.tags)):
            for value in wanted:
                # Said twice: SQLite takes the index of those that have a tag only for a query that leaves out the rest.
                query = f"SELECT id FROM jobs WHERE {column} = ? AND {column} <> '' ORDER BY id"  # noqa: S608
                found += _stretches(job_id for (job_id,) in self._execute(query, (value,)))
        return merge_ranges((first, last) for first, last in found if first <= last)

    def ids(self, first: int, last: int, states: Sequence[JobState] | None = None) -> Iterator[int]:
        """Those that exist, in order, fetched as they are asked for."""
        only = "" if states is None else f" AND state IN ({', '.join('?' * len(states))})"
        query = f"SELECT id FROM jobs WHERE id BETWEEN ? AND ?{only} ORDER BY id LIMIT 1000"  # noqa: S608
        while found := self._execute(query, (first, last, *(states or ()))).fetchall():
            yield from (job_id for (job_id,) in found)
            first = found[-1][0] + 1

    def first_unfinished(self, first: int, last: int) -> int | None:
        query = "SELECT id FROM jobs WHERE id BETWEEN ? AND ? AND ended_at IS NULL ORDER BY id LIMIT 1"
        row = self._execute(query, (first, last)).fetchone()
        return None if row is None else int(row[0])

    def unfinished(self) -> list[tuple[int, int]]:
        """Those that are not finished now, as stretches; where there are very many, what lies between them too."""
        found: list[int] = []
        for where in ("INDEXED BY jobs_ready WHERE state = 'queued'",
                      "INDEXED BY jobs_apart WHERE ended_at IS NULL AND state <> 'queued'"):  # fmt: skip
            rows_found = self._execute(f"SELECT id FROM jobs {where} LIMIT ?", (_MOST_APART,)).fetchall()  # noqa: S608
            found += [job_id for (job_id,) in rows_found]
        stretches = _stretches(iter(found))
        if len(found) < _MOST_APART and len(stretches) <= _MOST_STRETCHES:
            return stretches
        return [(self.first_unfinished(1, self.last_id()) or 1, self.last_id())]

    def tidy(self) -> None:
        """Inside a transaction: forgets what only forgotten jobs had."""
        self._execute(
            "DELETE FROM batches WHERE NOT EXISTS (SELECT 1 FROM submissions AS of_batch JOIN jobs "
            "ON jobs.id BETWEEN of_batch.first_id AND of_batch.last_id WHERE of_batch.first_id = batches.first_id)"
        )
        self._execute("DELETE FROM lanes WHERE id NOT IN (SELECT DISTINCT lane FROM jobs)")
        self._execute(
            "DELETE FROM submissions WHERE is_complete AND NOT EXISTS "
            "(SELECT 1 FROM jobs WHERE id BETWEEN first_id AND last_id)"
        )
        self._execute(
            "DELETE FROM profiles WHERE seen_at <= "
            "(SELECT seen_at FROM profiles ORDER BY seen_at DESC LIMIT 1 OFFSET ?)",
            (_MOST_PROFILES,),
        )
        self._store.forget_lanes()

    # What was learned

    def profiles(self, limit: int) -> list[tuple[str, Profile]]:
        """The last seen first."""
        query = "SELECT fingerprint, body FROM profiles ORDER BY seen_at DESC, fingerprint LIMIT ?"
        return [(row[0], row_codec.profile_from_text(row[1])) for row in self._execute(query, (limit,)).fetchall()]

    def forget_profiles(self, fingerprints: Sequence[str] | None) -> int:
        """Inside a transaction: these, or all; how many there were."""
        if fingerprints is None:
            return int(self._execute("DELETE FROM profiles").rowcount)
        query = "DELETE FROM profiles WHERE fingerprint = ?"
        return sum(int(self._execute(query, (each,)).rowcount) for each in fingerprints)

    def count_in(self, ranges: Sequence[tuple[int, int]], state: JobState) -> int:
        query = "SELECT count(*) FROM jobs WHERE id BETWEEN ? AND ? AND state = ?"
        return sum(self._execute(query, (first, last, state)).fetchone()[0] for first, last in ranges)

    def counts_in(self, first: int, last: int) -> dict[JobState, int]:
        query = "SELECT state, count(*) FROM jobs WHERE id BETWEEN ? AND ? GROUP BY state"
        return {JobState(state): count for state, count in self._execute(query, (first, last)).fetchall()}

    def jobs_in(self, first: int, last: int, limit: int) -> list[Job]:
        """In the order of their ids."""
        query = f"SELECT {row_codec.JOB_COLUMNS} FROM jobs WHERE id BETWEEN ? AND ? ORDER BY id LIMIT ?"  # noqa: S608
        return self._jobs(query, (first, last, limit))

    def tagged(self, tag: str, limit: int) -> list[Job]:
        """The last of them, in the order of their ids."""
        query = f"SELECT {row_codec.JOB_COLUMNS} FROM jobs WHERE tag = ? ORDER BY id DESC LIMIT ?"  # noqa: S608
        return self._jobs(query, (tag, limit))[::-1]

    def submission_of(self, first_id: int) -> tuple[int, int, str | None] | None:
        """The first and last id of the submission whose first job this is, and its token."""
        query = "SELECT first_id, last_id, token FROM submissions WHERE first_id = ? AND is_complete"
        row = self._execute(query, (first_id,)).fetchone()
        return None if row is None else (row[0], row[1], row[2])

    def in_state(self, states: Sequence[JobState], limit: int, offset: int = 0) -> list[Job]:
        """Of those that stand apart from the queue, in the order of their ids."""
        places = ", ".join("?" * len(states))
        query = (
            f"SELECT {row_codec.JOB_COLUMNS} FROM jobs INDEXED BY jobs_apart WHERE state IN ({places}) "  # noqa: S608
            "AND ended_at IS NULL AND state <> 'queued' ORDER BY state DESC, id LIMIT ? OFFSET ?"
        )
        return self._jobs(query, (*states, limit, offset))

    def finished(self, limit: int, offset: int = 0) -> list[Job]:
        """The last that finished first."""
        query = (
            f"SELECT {row_codec.JOB_COLUMNS} FROM jobs WHERE ended_at IS NOT NULL "  # noqa: S608
            "ORDER BY ended_at DESC LIMIT ? OFFSET ?"
        )
        return self._jobs(query, (limit, offset))

    def story(self, job_id: int) -> list[tuple[float, str, str | None]]:
        """What was noted of it: when, what, and why."""
        query = "SELECT at, kind, text FROM events WHERE job = ? ORDER BY id"
        return [(row[0], row[1], row[2]) for row in self._execute(query, (job_id,)).fetchall()]

    def forgettable(self, before: float, limit: int) -> list[tuple[int, int]]:
        """Finished jobs that nobody waits for any more, and how many attempts they had."""
        query = (
            "SELECT id, attempts FROM jobs WHERE ended_at < ? AND NOT EXISTS ("
            "SELECT 1 FROM dependencies JOIN jobs AS others ON others.id = dependencies.job WHERE on_job = jobs.id "
            "AND others.ended_at IS NULL) ORDER BY ended_at LIMIT ?"
        )
        return [(row[0], row[1]) for row in self._execute(query, (before, limit)).fetchall()]

    def forget(self, job_ids: Sequence[int]) -> None:
        """Inside a transaction. Specs that nobody shares any more go along."""
        places = [(job_id,) for job_id in job_ids]
        specs = {self._execute("SELECT spec FROM jobs WHERE id = ?", place).fetchone()[0] for place in places}
        for table, column in (("events", "job"), ("attempts", "job"), ("dependencies", "job"),
                              ("dependencies", "on_job"), ("jobs", "id")):  # fmt: skip
            self._db.executemany(f"DELETE FROM {table} WHERE {column} = ?", places)  # noqa: S608
        self._db.executemany(
            "DELETE FROM specs WHERE id = ? AND NOT EXISTS (SELECT 1 FROM jobs WHERE spec = ?)",
            [(spec, spec) for spec in specs],
        )
        self._store.spec.cache_clear()

    def _jobs(self, query: str, parameters: tuple[Any, ...]) -> list[Job]:
        return [
            row_codec.job_from_row(row, self._store.spec(row[1])) for row in self._execute(query, parameters).fetchall()
        ]


def _stretches(ids: Iterator[int]) -> list[tuple[int, int]]:
    return merge_ranges((job_id, job_id) for job_id in ids)
