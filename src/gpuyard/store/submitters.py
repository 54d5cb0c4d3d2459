"""Which processes submitted which jobs, and what a wait of theirs has reported.

A process is named by its pid, start time and boot id (`system.submitting_shell`). Each submission has a row for each
process that started the one that sent it: a wait finds the jobs of the nearest of its own that has submitted any.
"""

import itertools
from collections.abc import Iterable, Sequence

from gpuyard.core.job.selection import MOST_RANGES, merge_ranges
from gpuyard.store.database import Database


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
