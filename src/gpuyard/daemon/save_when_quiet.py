"""Saves the database when the queue is quiet: then its file alone is the queue, without its write-ahead log.

A small queue would otherwise live in the write-ahead log for days, and a copy of `queue.db` would be empty.
"""

import asyncio

from gpuyard.store.database import Database

# When nothing has changed for this long; and at the latest after a minute if something always changes.
_QUIET_S, _LONGEST_S = 3.0, 60.0


class QuietSaver:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._timer: asyncio.TimerHandle | None = None
        self._changes = 0
        self._save_by = 0.0

    def schedule(self) -> None:
        """Call it after each step; it costs nothing while nothing changes."""
        if self._timer is None and self._database.has_unsaved:
            loop = asyncio.get_running_loop()
            self._save_by = loop.time() + _LONGEST_S
            self._timer = loop.call_later(_QUIET_S, self._save)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _save(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        before, self._changes = self._changes, self._database.changes
        is_due = before == self._changes or loop.time() >= self._save_by
        if not is_due or not self._database.save():
            self._timer = loop.call_later(_QUIET_S, self._save)
