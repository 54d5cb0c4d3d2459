"""A record of how far the queue had come, in a small file beside the database.

The database alone cannot show that it is older than the queue was: it may be a copy of last week, or its write-ahead
log may have been deleted. The record holds

- `generation`, which is in the database, too, and goes up whenever the database is saved (`Database.save`);
- the highest job id;
- whether changes were committed since the last save, so that there must be a write-ahead log.

It is written with one `pwrite`, without a sync: when the first change after a save is committed, and when new jobs are.
"""

import os
import re
from pathlib import Path

from msgspec import Struct

from gpuyard.errors import EnvironmentFault

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
SET_GENERATION = "INSERT OR REPLACE INTO settings VALUES ('generation', ?)"
_CONTENT = re.compile(rb"(\d{12}) (\d{12}) ([01])\n")


class QueueProgress(Struct, frozen=True):
    generation: int = 0
    last_id: int = 0
    has_unsaved: bool = False


class QueueRecord:
    def __init__(self, path: Path) -> None:
        try:
            self._file = os.open(path, _FLAGS, 0o600)
            found = _CONTENT.match(os.pread(self._file, 100, 0))
        except OSError as error:
            raise EnvironmentFault(f"{path} cannot be used: {error.strerror}", hint="move it away") from error
        self.progress = QueueProgress(int(found[1]), int(found[2]), found[3] == b"1") if found else QueueProgress()

    def write(self, progress: QueueProgress) -> None:
        """Keep the highest job id that was ever recorded. Nothing depends on a record that cannot be written."""
        self.progress = QueueProgress(
            progress.generation, max(progress.last_id, self.progress.last_id), progress.has_unsaved
        )
        generation, last_id = self.progress.generation, self.progress.last_id
        content = f"{generation:012d} {last_id:012d} {self.progress.has_unsaved:d}\n"
        try:
            os.pwrite(self._file, content.encode(), 0)
        except OSError:
            return

    def close(self) -> None:
        os.close(self._file)


def compare(recorded: QueueProgress, found: QueueProgress, *, was_new: bool, has_log: bool) -> str | None:
    """Return what is wrong with a database, for a notice, or None.

    `found` is the progress according to the database; `was_new`: there was no database, or an empty file; `has_log`: it
    has a write-ahead log with content.
    """
    if was_new and recorded.last_id:
        return "the queue's database was missing or empty, and gpuyard started a new one"
    # With a higher generation in the database the save was complete, and the daemon was killed before it recorded that.
    if recorded.has_unsaved and not has_log and found.generation == recorded.generation:
        return "the write-ahead log of the queue's database (queue.db-wal) was removed"
    if found.generation < recorded.generation or found.last_id < recorded.last_id:
        return "the queue's database is an older copy"
    return None
