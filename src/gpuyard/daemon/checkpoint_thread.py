"""CheckpointThread: the database's waits for the disk, in a thread. The event loop goes on meanwhile.

- A checkpoint moves the write-ahead log into the database's file: when nothing has changed for a second, when the log
  has grown to 16 MB, and at the latest after a minute. A small queue would otherwise live in the log for days, and a
  copy of `queue.db` would be empty.
- Most of the log is copied while the loop writes. Then changes wait (`is_paused`, `may_write`) for the rest, which is
  three syncs of the disk: so the log does not outgrow its bound however much is written.
- A reader can keep the log from being emptied. If another program reads on and on, a notice says so.
- Requests are answered when their commits are on disk (`synced`). Requests at the same time share a sync.
"""

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from gpuyard.errors import EnvironmentFault, StoreFault
from gpuyard.store.checkpoints import WalCheckpoints
from gpuyard.store.database import Database, convert_sqlite_errors

_log = logging.getLogger(__name__)
_LOOK_S, _LONGEST_S, _RETRY_S = 1.0, 60.0, 5.0
_MB = 1 << 20
_LOG_LIMIT, _LARGE_LOG = 16 * _MB, 64 * _MB


class CheckpointThread:
    def __init__(self, database: Database, on_resume: Callable[[], None]) -> None:
        """`on_resume` is called when changes may go on after a pause."""
        self._database = database
        self._on_resume = on_resume
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
        if self._database.is_file:
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
                raise _sync_fault(error) from error
            self._synced = commits

    def notices(self) -> list[str]:
        return [] if self._problem is None else [self._problem]

    # Checkpoints

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
                problem = None if is_done or files.log_bytes < _LARGE_LOG else _reader_notice(files.log_bytes)
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


def _sync_fault(problem: OSError) -> StoreFault:
    return StoreFault(
        f"the change is made, and may be lost in a power cut: the disk does not store it ({problem.strerror})",
        hint="check the disk of the queue's folder, which `gpuyard daemon status` names, then try again",
    )


def _reader_notice(log_bytes: int) -> str:
    size = f"{log_bytes // _MB} MB"
    return f"queue.db-wal has grown to {size}, because another program keeps reading queue.db: end that program"
