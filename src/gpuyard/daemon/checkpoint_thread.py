"""CheckpointThread: the database's waits for the disk, in threads. The event loop goes on meanwhile.

- Changes are moved from the write-ahead log into the database's file when the log has grown to 16 MB. They are saved,
  which also truncates the log, when nothing has changed for 3 s, and at the latest after a minute: a small queue would
  otherwise live in the log for days, and a copy of `queue.db` would be empty.
- Most of the log is copied while the loop writes. Then changes wait (`is_paused`, `may_write`) for the rest, which is
  three syncs of the disk: so the log does not outgrow its bound however much is written.
- A reader can keep the log from being emptied. Beyond 64 MB, changes wait up to a second for readers to end, every 5 s;
  if another program reads on and on, a notice says so.
- Requests are answered when their commits are on disk (`synced`). Requests at the same time share a sync.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from gpuyard.errors import EnvironmentFault, StoreFault
from gpuyard.store.checkpoints import WalCheckpoints
from gpuyard.store.database import Database, convert_sqlite_errors

_log = logging.getLogger(__name__)
T = TypeVar("T")
# When nothing has changed for this long; and at the latest after a minute if something always changes.
_QUIET_S, _LONGEST_S = 3.0, 60.0
_MB = 1 << 20
_LOG_LIMIT, _LARGE_LOG = 16 * _MB, 64 * _MB
# How long changes wait for readers of the log, and until the next try if those have not ended.
_WAIT_S, _WAIT_IF_LARGE_S, _RETRY_S = 0.1, 1.0, 5.0


class CheckpointThread:
    def __init__(self, database: Database, on_resume: Callable[[], None]) -> None:
        """`on_resume` is called when changes may go on after a pause."""
        self._database = database
        self._on_resume = on_resume
        self._files: WalCheckpoints | None = None
        self._thread = ThreadPoolExecutor(1, "gpuyard-checkpoint")
        self._sync_thread = ThreadPoolExecutor(1, "gpuyard-sync")
        self._checkpoint: asyncio.Task[None] | None = None
        self._not_before = 0.0  # after a failure
        self._problem: str | None = None
        self._resumed: asyncio.Event | None = None
        self._waiting: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._changes = 0
        self._save_by = 0.0
        self._waiting_for_sync: list[asyncio.Future[None]] | None = None  # None: no sync is under way
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

    def close(self) -> None:
        """Wait for the checkpoint that is under way. The database waits for the disk itself again, such as to close."""
        if self._timer is not None:
            self._timer.cancel()
        for waits in (self._checkpoint, *(self._waiting_for_sync or ())):
            if waits is not None:
                waits.cancel()
        for thread in (self._thread, self._sync_thread):
            thread.shutdown(cancel_futures=True)
        if self._files is not None:
            self._database.leave_disk_to(None)
            self._files.close()
            self._files = None
        waiting, self._waiting = self._waiting, []
        for act in waiting:
            act()

    # Changes

    @property
    def is_paused(self) -> bool:
        """Whether changes have to wait, or would hold the loop: the rest of the log is being copied."""
        return self._resumed is not None

    async def may_write(self) -> None:
        """Wait while changes are paused. The caller may write until it waits for something else."""
        while self._resumed is not None:
            await self._resumed.wait()

    def when_writable(self, act: Callable[[], None]) -> None:
        """Call `act`, which writes: now, or at the end of the pause."""
        if self._resumed is None:
            act()
        else:
            self._waiting.append(act)

    @property
    def has_unsynced(self) -> bool:
        return self._files is not None and self._synced < self._database.commits_to_sync

    async def synced(self) -> None:
        """Wait until all commits so far that have to survive a power cut are on disk. Raises StoreFault."""
        wanted = self._database.commits_to_sync
        while self._files is not None and self._synced < wanted:
            if self._waiting_for_sync is None:
                self._waiting_for_sync = []
                loop, commits = asyncio.get_running_loop(), self._database.commits_to_sync
                self._sync_thread.submit(self._sync_log, self._files, loop, commits)
            # Each waits for a future of its own: a request that is cancelled cancels what it awaits.
            done = asyncio.get_running_loop().create_future()
            self._waiting_for_sync.append(done)
            await done

    def _sync_log(self, files: WalCheckpoints, loop: asyncio.AbstractEventLoop, commits: int) -> None:
        """Sync the log with these commits. Called in the thread."""
        problem = None
        try:
            files.sync()
        except OSError as error:
            problem = error
        loop.call_soon_threadsafe(self._end_sync, commits, problem)

    def _end_sync(self, commits: int, problem: OSError | None) -> None:
        waiting, self._waiting_for_sync = self._waiting_for_sync or (), None
        if problem is None:
            self._synced = commits
        for done in waiting:
            if done.done():  # cancelled
                continue
            if problem is None:
                done.set_result(None)
            else:
                done.set_exception(_sync_fault(problem))

    # Checkpoints

    def notices(self) -> list[str]:
        return [] if self._problem is None else [self._problem]

    def schedule(self) -> None:
        """Call it after each step; it costs nothing while nothing changes."""
        if self._timer is None and self._files is not None and self._database.has_unsaved:
            loop = asyncio.get_running_loop()
            self._save_by = loop.time() + _LONGEST_S
            self._timer = loop.call_later(_QUIET_S, self._save_if_quiet)

    def _save_if_quiet(self) -> None:
        loop = asyncio.get_running_loop()
        before, self._changes = self._changes, self._database.changes
        if self._database.has_unsaved:
            self._timer = loop.call_later(_QUIET_S, self._save_if_quiet)
            if before == self._changes or loop.time() >= self._save_by:
                self._begin(is_save=True)
        else:
            self._timer = None

    def _on_commit(self) -> None:
        if self._files is not None and self._checkpoint is None and self._files.log_bytes >= _LOG_LIMIT:
            self._begin(is_save=False)

    def _begin(self, *, is_save: bool) -> None:
        loop = asyncio.get_running_loop()
        if self._files is not None and self._checkpoint is None and loop.time() >= self._not_before:
            self._checkpoint = loop.create_task(self._make_checkpoint(self._files, is_save=is_save))

    async def _make_checkpoint(self, files: WalCheckpoints, *, is_save: bool) -> None:
        is_done = False
        try:
            await self._in_thread(files.copy)
            is_done = await self._empty(files, is_save=is_save)
            problem = None if is_done or files.log_bytes < _LARGE_LOG else _reader_notice(files.log_bytes)
        except (sqlite3.DatabaseError, OSError) as error:  # the log stays as it is
            problem = f"queue.db-wal cannot be moved into queue.db: {error}. Free some disk space, or mend the disk"
        finally:
            self._checkpoint = None
            loop = asyncio.get_running_loop()
            self._not_before = loop.time() + (0.0 if is_done else _RETRY_S)
            if is_done and is_save:
                self._save_by = loop.time() + _LONGEST_S
        if problem is not None and problem != self._problem:
            _log.error("%s; trying again every %g s", problem, _RETRY_S)
        self._problem = problem

    async def _empty(self, files: WalCheckpoints, *, is_save: bool) -> bool:
        """Copy the rest of the log and empty it, while changes wait. Return False if a reader prevents it.

        A save also begins a generation of the queue, and gives back the disk space of the log.
        """
        generation, changes = self._database.generation + is_save, self._database.changes
        wait_s = _WAIT_S if files.log_bytes < _LARGE_LOG else _WAIT_IF_LARGE_S
        self._resumed = resumed = asyncio.Event()
        try:
            is_done = await self._in_thread(partial(files.empty, generation, wait_s, is_truncated=is_save))
            if is_done and is_save:
                self._database.note_saved(generation, changes)
            return is_done
        finally:
            self._resumed = None
            resumed.set()
            waiting, self._waiting = self._waiting, []
            for act in (*waiting, self._on_resume):
                asyncio.get_running_loop().call_soon(act)

    async def _in_thread(self, act: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, act)


def _sync_fault(problem: OSError) -> StoreFault:
    return StoreFault(
        f"the change is made, and may be lost in a power cut: the disk does not store it ({problem.strerror})",
        hint="check the disk of the queue's folder, which `gpuyard daemon status` names, then try again",
    )


def _reader_notice(log_bytes: int) -> str:
    size = f"{log_bytes // _MB} MB"
    return f"queue.db-wal has grown to {size}, because another program keeps reading queue.db: end that program"
