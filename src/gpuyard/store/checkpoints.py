"""The database's waits for the disk, in threads: checkpoints of the write-ahead log, and syncs. The event loop goes on.
A crash at any point loses nothing: the next connection reads what is left in the log.

- A checkpoint follows a second without changes, 16 MB of log, or a minute. Most of the log is copied while the loop
  writes. Then changes wait (`is_paused`, `may_write`) for the rest, which is three syncs of the disk.
- While others may write, a checkpoint keeps a snapshot of the log open: then no writer begins a new round of the log.
  SQLite up to 3.51.2 may otherwise take frames of the new round for copied ones, and lose them ("WAL-reset bug").
"""

import asyncio
import contextlib
import logging
import os
import sqlite3
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from gpuyard.errors import EnvironmentFault, StoreFault
from gpuyard.store.database import SET_GENERATION, Database, convert_sqlite_errors

_sync = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync


class WalCheckpoints:
    """Call its methods in one thread at a time, and `sync` in any."""

    def __init__(self, database: Database) -> None:
        """Open the files now: later, another queue's database may have this path."""
        path = database.path
        self._file, self._log, self._index = map(database.open_descriptor, ("", "-wal", "-shm"))
        self._connection = _connect(path)
        self._snapshot = _connect(path)
        self._frame_bytes = 24 + int(database.value("PRAGMA page_size"))  # a header precedes each page
        # False if all frames of the log may have been copied: a snapshot would not keep writers from beginning it anew.
        self._has_frames = True

    @property
    def log_bytes(self) -> int:
        """The part of the log that is in use, by its index: the file stays as large as it once was."""
        return int.from_bytes(os.pread(self._index, 4, 16), sys.byteorder) * self._frame_bytes

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
        mode = "TRUNCATE" if is_truncated else "RESTART"
        try:
            self._connection.execute(SET_GENERATION, (str(generation),))
            self._has_frames = False
            if self._connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()[0]:
                return False
            self._connection.execute(SET_GENERATION, (str(generation),))  # begins the next log
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
                return False
            raise
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


_log = logging.getLogger(__name__)
_LOOK_S, _LONGEST_S, _RETRY_S = 1.0, 60.0, 5.0
_MB = 1 << 20
_LOG_LIMIT, _LARGE_LOG = 16 * _MB, 64 * _MB


class CheckpointThread:
    def __init__(self, database: Database, on_resume: Callable[[], None]) -> None:
        """`on_resume` is called when changes may go on after a pause."""
        self._database, self._on_resume = database, on_resume
        self._files: WalCheckpoints | None = None
        self._threads = ThreadPoolExecutor(2, "gpuyard-disk")  # a sync does not wait for a checkpoint
        self._task: asyncio.Task[None] | None = None
        self._committed, self._is_large = asyncio.Event(), asyncio.Event()  # since the last look
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._problem: str | None = None
        self._sync_lock = asyncio.Lock()
        self._synced = 0

    def start(self) -> None:
        """Take over the waits for the disk of a database that is a file. Call it in the event loop."""
        if self._database.record is not None:
            try:
                with convert_sqlite_errors():
                    self._files = WalCheckpoints(self._database)
                    self._database.leave_disk_to(self._on_commit)
            except OSError as error:
                raise EnvironmentFault(f"{error.filename} cannot be used: {error.strerror}") from error
            self._committed.set()  # what was committed before
            self._task = asyncio.get_running_loop().create_task(self._run(self._files))

    def close(self) -> None:
        """Wait for the checkpoint that is under way. The database waits for the disk itself again, such as to close."""
        if self._task is not None:
            self._task.cancel()
        self._threads.shutdown(cancel_futures=True)
        if self._files is not None:
            self._database.leave_disk_to(None)
            self._files.close()
            self._files = None

    @property
    def is_paused(self) -> bool:
        """Whether changes have to wait, or would hold the loop: the rest of the log is being copied."""
        return not self._may_write.is_set()

    async def may_write(self) -> None:
        """Wait while changes are paused. The caller may write until it waits for something else."""
        while self.is_paused:
            await self._may_write.wait()

    @property
    def has_unsynced(self) -> bool:
        return self._files is not None and self._synced < self._database.commits_to_sync

    async def synced(self) -> None:
        """Wait until all commits so far that have to survive a power cut are on disk. Raises StoreFault."""
        wanted = self._database.commits_to_sync
        async with self._sync_lock:
            if self._files is None or self._synced >= wanted:
                return
            commits = self._database.commits_to_sync
            try:
                await asyncio.get_running_loop().run_in_executor(self._threads, self._files.sync)
            except OSError as error:
                lost = "the change is made, and may be lost in a power cut"
                raise StoreFault(
                    f"{lost}: the disk does not store it ({error.strerror})",
                    hint="check the disk of the queue's folder, which `gpuyard daemon status` names, then try again",
                ) from error
            self._synced = commits

    def notices(self) -> list[str]:
        return [] if self._problem is None else [self._problem]

    def _on_commit(self) -> None:
        if self._database.has_unsaved:  # else nothing was changed: the step that a checkpoint wakes causes none
            self._committed.set()
        if self._files is not None and self._files.log_bytes >= _LOG_LIMIT:
            self._is_large.set()

    async def _run(self, files: WalCheckpoints) -> None:
        loop = asyncio.get_running_loop()
        last_at = loop.time()
        while True:
            await self._committed.wait()
            self._committed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._is_large.wait()
            self._is_large.clear()
            is_quiet = not self._committed.is_set()
            if not (is_quiet or files.log_bytes >= _LOG_LIMIT or loop.time() >= last_at + _LONGEST_S):
                continue
            is_done, problem = False, None
            try:
                is_done = await self._make_checkpoint(files, is_truncated=is_quiet)
                if not is_done and files.log_bytes >= _LARGE_LOG:
                    why = "because another program keeps reading queue.db: end that program"
                    problem = f"queue.db-wal has grown to {files.log_bytes // _MB} MB, {why}"
            except (sqlite3.DatabaseError, OSError) as error:  # the log stays as it is
                problem = f"queue.db-wal cannot be moved into queue.db: {error}. Free some disk space, or mend the disk"
            if problem is not None and problem != self._problem:
                _log.error("%s; trying again every %g s", problem, _RETRY_S)
            self._problem = problem
            last_at = loop.time()
            if not is_done:
                await asyncio.sleep(_RETRY_S)
            if self._database.has_unsaved:
                self._committed.set()

    async def _make_checkpoint(self, files: WalCheckpoints, *, is_truncated: bool) -> bool:
        """Copy the log and empty it; changes wait for the end of that. Return False if a reader prevents it."""
        in_thread = asyncio.get_running_loop().run_in_executor
        await in_thread(self._threads, files.copy)
        generation, changes = self._database.generation + 1, self._database.changes
        self._may_write.clear()
        try:
            is_done = await in_thread(self._threads, partial(files.empty, generation, is_truncated=is_truncated))
            if is_done:
                self._database.note_saved(generation, changes)
        finally:
            self._may_write.set()
            self._on_resume()
        return is_done
