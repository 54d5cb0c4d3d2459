"""WalCheckpoints: moves the write-ahead log into the database's file, in a thread, over connections of its own.

A checkpoint waits for the disk three times: for the log, for the file, and for the header of the log's next round. The
thread does all three, so that the connection of the daemon's loop, which makes no checkpoints, waits for none.

Rules:
- While others may write, a checkpoint keeps a snapshot of the log open: then no writer begins a new round of the log.
  SQLite up to 3.51.2 may otherwise take frames of the new round for copied ones, and lose them (its "WAL-reset bug").
- The log is emptied while the loop does not write. The first frame of its next round is written here, too, because
  that write waits for the disk.
- A crash at any point loses nothing: the next connection reads what is left in the log.
"""

import os
import sqlite3
from pathlib import Path

from gpuyard.store.queue_record import SET_GENERATION

_sync = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync


class WalCheckpoints:
    """Call its methods in one thread at a time, and `sync` in any."""

    def __init__(self, path: Path) -> None:
        """Open the connections now: later, another queue's database may have this path."""
        self._path = path
        self._connection = _connect(path)
        self._snapshot = _connect(path)
        self._log = os.open(f"{path}-wal", os.O_RDONLY | os.O_CLOEXEC)
        # False if all frames of the log may have been copied: a snapshot would not keep writers from beginning it anew.
        self._has_frames = True

    @property
    def log_bytes(self) -> int:
        return os.fstat(self._log).st_size

    def sync(self) -> None:
        """Wait until everything that was committed so far is on disk."""
        _sync(self._log)

    def copy(self) -> None:
        """Copy most of the log into the file while others write. Call `empty` next: it ends the snapshot."""
        if self._has_frames:
            self._snapshot.execute("BEGIN")
            self._snapshot.execute("SELECT 1 FROM settings").fetchone()
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()

    def empty(self, generation: int, wait_s: float) -> bool:
        """Copy the rest, with this generation of the queue, and empty the log. Writers have to wait meanwhile.

        Return False if a reader prevents it for `wait_s` seconds.
        """
        if self._snapshot.in_transaction:
            self._snapshot.execute("ROLLBACK")
        self._connection.execute(f"PRAGMA busy_timeout = {int(wait_s * 1000)}")
        self._connection.execute(SET_GENERATION, (str(generation),))
        self._has_frames = False
        if self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
            return False
        self._connection.execute(SET_GENERATION, (str(generation),))  # begins the next log
        self._has_frames = True
        return True

    def close(self) -> None:
        self._snapshot.close()
        self._connection.close()
        os.close(self._log)


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute("SELECT 1 FROM settings").fetchone()  # opens the log
    except BaseException:
        connection.close()
        raise
    return connection
