"""Submissions: which processes sent them and what a wait of theirs has reported, and those that were refused half-way.

The jobs of a refused submission are neither listed nor counted, and do not start. They are deleted in pieces.
"""

import itertools
from collections.abc import Iterable, Sequence

from gpuyard.model.selection import MOST_RANGES, merge_ranges
from gpuyard.store.database import Database


class RefusedSubmissions:
    def __init__(self, database: Database) -> None:
        self._db = database
        self._ranges: dict[int, tuple[int, int]] = {}  # the first and last job id, by submission

    def __bool__(self) -> bool:
        # By the first job, too: once it is deleted, a submission that arrives may get its id.
        query = "SELECT 1 FROM submissions WHERE id = ? AND first_id = ? AND NOT is_complete"
        self._ranges = {
            each: ids for each, ids in self._ranges.items() if self._db.value(query, (each, ids[0])) is not None
        }
        return bool(self._ranges)

    def add(self, submission: int, first: int, last: int) -> None:
        self._ranges[submission] = first, last

    def subtract_from(self, counts: dict[str, int]) -> None:
        """Subtract their jobs from the numbers of jobs per state."""
        if not self:
            return
        query = "SELECT state, count(*) FROM jobs WHERE id BETWEEN ? AND ? GROUP BY state"
        for ids in self._ranges.values():
            for state, jobs in self._db.execute(query, ids).fetchall():
                counts[state] -= jobs

    def drop_some(self, most: int) -> int | None:
        """Delete up to `most` jobs of one submission, the last ones first. Call it in a transaction.

        Return the submission once only `most` of its jobs are left: delete it, with these.
        """
        submission, (first, last) = next(iter(self._ranges.items()))
        highest = self._db.value("SELECT max(id) FROM jobs WHERE id BETWEEN ? AND ?", (first, last))
        if highest is None or highest < first + most:
            return submission
        for table, column in (("dependencies", "job"), ("events", "job"), ("jobs", "id")):
            query = f"DELETE FROM {table} WHERE {column} BETWEEN ? AND ?"  # noqa: S608 - our own names
            self._db.execute(query, (highest - most + 1, last))
        return None


class Submitters:
    def __init__(self, database: Database) -> None:
        self._execute = database.execute
        self._executemany = database.executemany
        self._value = database.value
        self._column = database.column

    def add(self, submission: int, processes: Iterable[str]) -> None:
        """Record the processes of a submission. Call it in a transaction."""
        rows = [(process, submission) for process in dict.fromkeys(processes)]
        if rows:
            self._executemany("INSERT INTO submitters (process, submission) VALUES (?, ?)", rows)

    def nearest(self, processes: Sequence[str]) -> str | None:
        """Return the first of these processes that has submitted jobs; None if none has."""
        query = "SELECT 1 FROM submitters WHERE process = ? LIMIT 1"
        return next((process for process in processes if self._value(query, (process,))), None)

    def unreported(self, process: str) -> list[tuple[int, int]]:
        """Return the jobs of a process that no wait has reported since they were submitted or last ran, as pairs of
        first and last id. Of very many pairs the nearest are joined, with the jobs of others between them."""
        own = "FROM submitters JOIN submissions ON submissions.id = submission WHERE process = ? AND is_complete"
        found = self._execute(f"SELECT first_id, last_id {own} AND waited_at IS NULL", (process,)).fetchall()
        again = self._column(
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
        self._executemany(query, rows)


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
