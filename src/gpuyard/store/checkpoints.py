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
import sys
from pathlib import Path

from gpuyard.store.database import Database
from gpuyard.store.queue_record import SET_GENERATION

# In the file formats of SQLite: the last frame of the log, in its index; and what precedes a page in the log.
_LAST_FRAME_AT, _FRAME_HEADER_BYTES = 16, 24
_PRIMARY_CODE = 0xFF  # the rest of an error's code says more about it
_sync = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync


class WalCheckpoints:
    """Call its methods in one thread at a time, and `sync` in any."""

    def __init__(self, database: Database) -> None:
        """Open the files now: later, another queue's database may have this path."""
        path = database.path
        self._file, self._log, self._index = map(database.open_descriptor, ("", "-wal", "-shm"))
        self._connection = _connect(path)
        self._snapshot = _connect(path)
        self._frame_bytes = _FRAME_HEADER_BYTES + int(database.value("PRAGMA page_size"))
        # False if all frames of the log may have been copied: a snapshot would not keep writers from beginning it anew.
        self._has_frames = True

    @property
    def log_bytes(self) -> int:
        """The part of the log that is in use: its file stays as large as it once was, until it is truncated."""
        return int.from_bytes(os.pread(self._index, 4, _LAST_FRAME_AT), sys.byteorder) * self._frame_bytes

    def sync(self) -> None:
        """Wait until everything that was committed so far is on disk."""
        _sync(self._log)

    def copy(self) -> None:
        """Copy most of the log into the file while others write. Call `empty` next: it ends the snapshot."""
        if not self._has_frames:
            return
        try:
            self._snapshot.execute("BEGIN")
            self._snapshot.execute("SELECT 1 FROM settings").fetchone()
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            # SQLite does not, if something was written meanwhile: all of it would be left to `empty`.
            _sync(self._file)
        except BaseException:
            self._has_frames = False
            self._end_snapshot()
            raise

    def empty(self, generation: int, *, is_truncated: bool) -> bool:
        """Copy the rest, with this generation of the queue, and empty the log. Writers have to wait meanwhile.

        `is_truncated`: give its disk space back, too, which took 100 ms for 40 MB on a disk that discards freed blocks.
        Otherwise the next log overwrites it. Return False if a reader or a writer prevents it for 0.1 s.
        """
        self._end_snapshot()
        try:
            return self._empty(generation, is_truncated=is_truncated)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & _PRIMARY_CODE == sqlite3.SQLITE_BUSY:
                return False
            raise

    def _empty(self, generation: int, *, is_truncated: bool) -> bool:
        self._connection.execute(SET_GENERATION, (str(generation),))
        self._has_frames = False
        mode = "TRUNCATE" if is_truncated else "RESTART"
        if self._connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()[0]:
            return False
        self._connection.execute(SET_GENERATION, (str(generation),))  # begins the next log
        self._has_frames = True
        return True

    def _end_snapshot(self) -> None:
        if self._snapshot.in_transaction:
            self._snapshot.execute("ROLLBACK")

    def close(self) -> None:
        self._snapshot.close()
        self._connection.close()


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute("PRAGMA busy_timeout = 100")
        connection.execute("SELECT 1 FROM settings").fetchone()  # opens the log
    except BaseException:
        connection.close()
        raise
    return connection
