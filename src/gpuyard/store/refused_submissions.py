"""Submissions that were refused after a part of their jobs had been stored, such as when the disk became full.

Their jobs are neither listed nor counted, and do not start. They are deleted in pieces as soon as the disk allows that;
the next daemon would delete them, too.
"""

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
