"""Stores what is known of the code of jobs besides their specs: snapshots that are in use, changes of scripts."""

import json
from collections.abc import Generator, Iterable, Sequence

from gpuyard.core.job.code_record import CodeRecord
from gpuyard.store.database import PIECE, Database


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

    # Scripts

    def add_changed_script(self, job_id: int, attempt: int) -> None:
        self._db.execute("INSERT OR IGNORE INTO changed_scripts VALUES (?, ?)", (job_id, attempt))

    def changed_scripts(self, job_id: int) -> tuple[int, ...]:
        """Return the attempts of a job that started with another script than was submitted."""
        query = "SELECT number FROM changed_scripts WHERE job = ? ORDER BY number"
        return tuple(self._db.column(query, (job_id,)))

    # Snapshots

    def is_used(self, snapshot: str) -> bool:
        return self._db.value("SELECT 1 FROM spec_code WHERE snapshot = ? LIMIT 1", (snapshot,)) is not None

    def last_end(self, snapshot: str) -> Generator[None, None, float | None]:
        """Return when the last job with this snapshot ended; None if one has not. Yields after each page of jobs."""
        last = 0.0
        specs = "SELECT spec FROM spec_code WHERE snapshot = ?"
        query = "SELECT id, ended_at FROM jobs WHERE spec = ? AND id < ? ORDER BY id DESC LIMIT ?"
        for spec in self._db.column(specs, (snapshot,)):
            below = 1 << 62
            while page := self._db.execute(query, (spec, below, PIECE)).fetchall():
                if any(ended_at is None for _, ended_at in page):
                    return None
                last, below = max(last, *(ended_at for _, ended_at in page)), page[-1][0]
                yield
        return last

    def specs_to_run_again(self, job_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Return those of these jobs that have a snapshot, with their specs. They are about to run again: a snapshot
        that was found to be over may be in use."""
        query = (
            "SELECT id, spec FROM jobs WHERE id IN (SELECT value FROM json_each(?)) "
            "AND spec IN (SELECT spec FROM spec_code WHERE snapshot IS NOT NULL)"
        )
        found = self._db.execute(query, (json.dumps(job_ids),)).fetchall()
        self.retries += bool(found)
        return found
