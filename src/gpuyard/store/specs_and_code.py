"""Stores the specs of jobs, what is known of their code, and who sent their submissions. Values of variables that look
secret have a table of their own, and do not stay.

- A spec's secrets are deleted once all its jobs have ended. SQLite then overwrites them (`secure_delete`), and saving
  the database removes them from the write-ahead log.
- A job whose secrets were dropped does not run again before a user has supplied them, or said that it runs without.
"""

import contextlib
import itertools
import json
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from msgspec.structs import replace

from gpuyard.model.job_spec import CodeRecord, JobSpec
from gpuyard.model.selection import MOST_RANGES, merge_ranges
from gpuyard.store import row_codec
from gpuyard.store.database import PIECE, Database


def _pages(database: Database, spec: int) -> Iterator[list[tuple[int, float | None]]]:
    """Yield the ids and ends of a spec's jobs, the last first: jobs of an array start in order."""
    below = 1 << 62
    query = "SELECT id, ended_at FROM jobs WHERE spec = ? AND id < ? ORDER BY id DESC LIMIT ?"
    while page := database.execute(query, (spec, below, PIECE)).fetchall():
        yield page
        below = page[-1][0]


class StoredCode:
    def __init__(self, database: Database) -> None:
        self._db = database
        self.retries = 0  # number of times that jobs with snapshots were asked for, to run again

    def add(self, spec: int, code: CodeRecord) -> None:
        """Note the code of a new spec. Call it in a transaction."""
        if code.root is not None or code.snapshot is not None:
            name = None if code.snapshot is None else code.snapshot.name
            self._db.execute("INSERT INTO spec_code (spec, snapshot) VALUES (?, ?)", (spec, name))

    def spec_of(self, job_id: int) -> int | None:
        spec: int | None = self._db.value("SELECT spec FROM jobs WHERE id = ?", (job_id,))
        return spec

    def set_dirty(self, specs: Iterable[int], *, is_dirty: bool) -> None:
        rows = [(is_dirty, spec) for spec in specs]
        with self._db.transaction():
            self._db.executemany("UPDATE spec_code SET is_dirty = ? WHERE spec = ?", rows)

    def is_dirty(self, job_id: int) -> bool | None:
        query = "SELECT is_dirty FROM spec_code WHERE spec = (SELECT spec FROM jobs WHERE id = ?)"
        found = self._db.value(query, (job_id,))
        return None if found is None else bool(found)

    def add_changed_script(self, job_id: int, attempt: int) -> None:
        self._db.execute("INSERT OR IGNORE INTO changed_scripts VALUES (?, ?)", (job_id, attempt))

    def changed_scripts(self, job_id: int) -> tuple[int, ...]:
        """Return the attempts of a job that started with another script than was submitted."""
        query = "SELECT number FROM changed_scripts WHERE job = ? ORDER BY number"
        return tuple(self._db.column(query, (job_id,)))

    def is_used(self, snapshot: str) -> bool:
        return self._db.value("SELECT 1 FROM spec_code WHERE snapshot = ? LIMIT 1", (snapshot,)) is not None

    def last_end(self, snapshot: str) -> Generator[None, None, float | None]:
        """Return when the last job with this snapshot ended; None if one has not. Yields after each page of jobs."""
        last = 0.0
        for spec in self._db.column("SELECT spec FROM spec_code WHERE snapshot = ?", (snapshot,)):
            for page in _pages(self._db, spec):
                if any(ended_at is None for _, ended_at in page):
                    return None
                last = max(last, *(ended_at or 0.0 for _, ended_at in page))
                yield
        return last

    def specs_to_run_again(self, job_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Return the jobs with a snapshot, and their specs: a snapshot that was found to be over may be in use."""
        query = (
            "SELECT id, spec FROM jobs WHERE id IN (SELECT value FROM json_each(?)) "
            "AND spec IN (SELECT spec FROM spec_code WHERE snapshot IS NOT NULL)"
        )
        found = self._db.execute(query, (json.dumps(job_ids),)).fetchall()
        self.retries += bool(found)
        return found


class StoredSpecs:
    def __init__(self, database: Database) -> None:
        self._db = database
        self.code = StoredCode(database)
        self.read = lru_cache(maxsize=512)(self._read)
        self.may_have_secrets = True
        self._unfinished: dict[int, int] = {}  # a job that was found unfinished, by spec
        self._supplied = 0  # number of calls of `supply`

    def add(self, spec: JobSpec) -> int:
        secrets = {name: spec.environment[name] for name in spec.secrets}
        others = {name: value for name, value in spec.environment.items() if name not in secrets}
        body = row_codec.spec_to_text(replace(spec, environment=others))
        row = (body, row_codec.printable(" ".join(spec.command)))
        number = self._db.execute("INSERT INTO specs (body, command) VALUES (?, ?)", row).lastrowid or 0
        if secrets:
            self._keep(number, secrets)
        self.code.add(number, spec.code)
        return number

    def delete_unused(self, numbers: Iterable[int]) -> None:
        """Delete those of these specs that no job has. Call it in a transaction."""
        query = "SELECT 1 FROM jobs WHERE spec = ? LIMIT 1"
        unused = [(number,) for number in numbers if self._db.value(query, (number,)) is None]
        with self._overwriting():
            for table, column in (
                ("secrets", "spec"), ("dropped_secrets", "spec"), ("spec_code", "spec"), ("specs", "id"),
            ):  # fmt: skip
                self._db.executemany(f"DELETE FROM {table} WHERE {column} = ?", unused)  # noqa: S608 - our own names
        self.read.cache_clear()  # a later spec may get its id

    def drop_secrets(self) -> Generator[None, None, None]:
        """Delete the secrets of all specs whose jobs have all ended; yield after each piece of work."""
        for spec in self._db.column("SELECT spec FROM secrets"):
            if (yield from self._is_over(spec)):
                self._drop(spec)
            yield
        self.may_have_secrets = self._db.value("SELECT 1 FROM secrets LIMIT 1") is not None

    def supply(
        self, job_ids: Sequence[int], values: Mapping[str, str], *, allow_missing: bool
    ) -> dict[int, tuple[str, ...]]:
        """Restore the secrets of those jobs that lost them, in a transaction. Return the jobs that lack values, and
        which. With `allow_missing` they run without them."""
        self._supplied += 1
        query = (
            "SELECT id, spec FROM jobs WHERE id IN (SELECT value FROM json_each(?)) "
            "AND spec IN (SELECT spec FROM dropped_secrets)"
        )
        lacking = {}
        for job_id, number in self._db.execute(query, (json.dumps(job_ids),)).fetchall():
            spec = self.read(number)
            missing = tuple(name for name in spec.dropped if name not in values)
            if missing and not allow_missing:
                lacking[job_id] = missing
            elif supplied := {name: values[name] for name in spec.dropped if name in values}:
                kept = {name: spec.environment[name] for name in spec.secrets if name in spec.environment}
                self._keep(number, {**kept, **supplied}, is_complete=not missing)
        return lacking

    def _keep(self, number: int, secrets: Mapping[str, str], *, is_complete: bool = True) -> None:
        """Store a spec's secrets. It may lack some for one job of an array: the others are asked for them again."""
        # Not with ensure_ascii=False: a value may have bytes that are not UTF-8.
        self._db.execute("INSERT OR REPLACE INTO secrets VALUES (?, ?)", (number, json.dumps(secrets)))
        if is_complete:
            self._db.execute("DELETE FROM dropped_secrets WHERE spec = ?", (number,))
        self.read.cache_clear()
        self.may_have_secrets = True

    def _is_over(self, spec: int) -> Generator[None, None, bool]:
        """Return whether all jobs of the spec have ended; yield after each page."""
        first = self._unfinished.get(spec)
        if first is not None and self._db.value("SELECT ended_at IS NULL FROM jobs WHERE id = ?", (first,)):
            return False
        supplied = self._supplied
        for page in _pages(self._db, spec):
            unfinished = next((job_id for job_id, ended_at in page if ended_at is None), None)
            if unfinished is not None:
                self._unfinished[spec] = unfinished
                return False
            yield
        return supplied == self._supplied  # else a job that was looked at may have been queued again

    def _drop(self, spec: int) -> None:
        with self._overwriting(), self._db.transaction():
            self._db.execute("DELETE FROM secrets WHERE spec = ?", (spec,))
            self._db.execute("INSERT OR IGNORE INTO dropped_secrets VALUES (?)", (spec,))
            if self._db.value("SELECT 1 FROM secrets LIMIT 1") is None:
                # Rows may have moved within the table's pages: without a condition SQLite overwrites the pages whole.
                self._db.execute("DELETE FROM secrets")
        self._unfinished.pop(spec, None)
        self.read.cache_clear()

    @contextlib.contextmanager
    def _overwriting(self) -> Iterator[None]:
        self._db.execute("PRAGMA secure_delete = ON")
        try:
            yield
        finally:
            self._db.execute("PRAGMA secure_delete = OFF")

    def _read(self, number: int) -> JobSpec:
        spec = row_codec.spec_from_text(self._db.value("SELECT body FROM specs WHERE id = ?", (number,)))
        if not spec.secrets:
            return spec
        kept = self._db.value("SELECT body FROM secrets WHERE spec = ?", (number,))
        values = {} if kept is None else json.loads(kept)
        dropped = tuple(name for name in spec.secrets if name not in values)
        return replace(spec, environment={**spec.environment, **values}, dropped=dropped)


class RefusedSubmissions:
    """Those refused half-way: their jobs are neither listed nor counted, do not start, and are deleted in pieces."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._ranges: dict[int, tuple[int, int]] = {}  # the first and last job id, by submission

    def __bool__(self) -> bool:
        # By the first job, too: once it is deleted, a submission that arrives may get its id.
        query = "SELECT 1 FROM submissions WHERE id = ? AND first_id = ? AND NOT is_complete"
        known = self._db.value
        self._ranges = {each: ids for each, ids in self._ranges.items() if known(query, (each, ids[0])) is not None}
        return bool(self._ranges)

    def add(self, submission: int, first: int, last: int) -> None:
        self._ranges[submission] = first, last

    def subtract_from(self, counts: dict[str, int]) -> None:
        """Subtract their jobs from the numbers of jobs per state."""
        query = "SELECT state, count(*) FROM jobs WHERE id BETWEEN ? AND ? GROUP BY state"
        for ids in self._ranges.values() if self else ():
            for state, jobs in self._db.execute(query, ids).fetchall():
                counts[state] -= jobs

    def drop_some(self, most: int) -> int | None:
        """Delete up to `most` jobs of one submission, the last ones first, in a transaction. Return the submission once
        only `most` of its jobs are left: delete it, with these."""
        submission, (first, last) = next(iter(self._ranges.items()))
        highest = self._db.value("SELECT max(id) FROM jobs WHERE id BETWEEN ? AND ?", (first, last))
        if highest is None or highest < first + most:
            return submission
        for table, column in (("dependencies", "job"), ("events", "job"), ("jobs", "id")):
            query = f"DELETE FROM {table} WHERE {column} BETWEEN ? AND ?"  # noqa: S608 - our own names
            self._db.execute(query, (highest - most + 1, last))
        return None


class Submitters:
    """Which processes sent a submission, and what a wait of theirs has reported."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def add(self, submission: int, processes: Iterable[str]) -> None:
        """Record the processes of a submission. Call it in a transaction."""
        rows = [(process, submission) for process in dict.fromkeys(processes)]
        self._db.executemany("INSERT INTO submitters (process, submission) VALUES (?, ?)", rows)

    def nearest(self, processes: Sequence[str]) -> str | None:
        """Return the first of these processes that has submitted jobs; None if none has."""
        query = "SELECT 1 FROM submitters WHERE process = ? LIMIT 1"
        return next((process for process in processes if self._db.value(query, (process,))), None)

    def unreported(self, process: str) -> list[tuple[int, int]]:
        """Return the jobs of a process that no wait has reported since they were submitted or last ran, as pairs of
        first and last id. Of very many pairs the nearest are joined, with the jobs of others between them."""
        own = "FROM submitters JOIN submissions ON submissions.id = submission WHERE process = ? AND is_complete"
        found = self._db.execute(f"SELECT first_id, last_id {own} AND waited_at IS NULL", (process,)).fetchall()
        again = self._db.column(
            "SELECT jobs.id FROM submitters JOIN submissions ON submissions.id = submission "
            "JOIN jobs ON jobs.id BETWEEN first_id AND last_id WHERE process = ? AND is_complete "
            "AND waited_at IS NOT NULL AND (jobs.ended_at IS NULL OR jobs.ended_at > waited_at)",
            (process,),
        )
        return _join_nearest(merge_ranges([*found, *((job_id, job_id) for job_id in again)]), MOST_RANGES)

    def mark_reported(self, process: str, ranges: Sequence[tuple[int, int]], at: float, *, is_complete: bool) -> None:
        """Record that a wait has reported the jobs of this process in these ranges. `is_complete`: the ranges are all
        that `unreported` returned; else a submission with jobs beyond them stays as it is. Call it in a transaction."""
        inside = "first_id >= ? AND last_id <= ?"
        if is_complete:
            inside = f"({inside} OR (waited_at IS NOT NULL AND first_id <= ? AND last_id >= ?))"
        query = (
            f"UPDATE submissions SET waited_at = ? WHERE {inside} "  # noqa: S608 - our own text
            "AND id IN (SELECT submission FROM submitters WHERE process = ?)"
        )
        rows = [(at, first, last, *((last, first) if is_complete else ()), process) for first, last in ranges]
        self._db.executemany(query, rows)


def _join_nearest(ranges: list[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """Return at most `most` ranges that contain these, with the smallest gaps between them closed."""
    if len(ranges) <= most:
        return ranges
    gaps = sorted((after[0] - before[1], after[0]) for before, after in itertools.pairwise(ranges))
    starts = sorted({ranges[0][0], *(start for _, start in gaps[len(gaps) - most + 1 :])})
    return [
        (start, max(last for first, last in ranges if start <= first and (end is None or first < end)))
        for start, end in itertools.zip_longest(starts, starts[1:])
    ]
