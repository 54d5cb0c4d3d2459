"""Keeps what `[keep]` in config.toml says, and deletes the rest: old finished jobs, logs, and secrets of ended jobs.

- No piece of work holds up the loop for more than a few milliseconds, and all together take a tenth of its time at
  most. Log files are listed and removed in a thread, which sleeps now and then: other threads wait 5 ms for Python's
  global lock unless its holder sleeps.
- The log of a job that has not finished is never removed: it runs, or may be retried.
"""

import asyncio
import contextlib
import logging
import os
import re
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from gpuyard.config import KeepConfig, load_config
from gpuyard.daemon.api.slow_requests import run_in_pieces
from gpuyard.daemon.job_code import CodeSnapshots
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.engines.local.attempt_processes import jobs_of_queue
from gpuyard.engines.open_cluster_engine import log_folders
from gpuyard.errors import EnvironmentFault, GpuyardError
from gpuyard.model.units import MB
from gpuyard.queue.add_submission import InPieces
from gpuyard.queue.step import Step
from gpuyard.schema.queue import CleanResult, KeptFiles
from gpuyard.store.database import PIECE, convert_sqlite_errors

# Only what gpuyard names so is ever removed: 17.1.log, of attempt 1 of job 17.
_NAME = re.compile(r"(\d{1,18})\.\d{1,9}\.[a-z.]+", re.ASCII)
_log = logging.getLogger(__name__)
T = TypeVar("T")
_FIRST_AFTER_S, _EVERY_S, _AFTER_FAILURE_S = 60.0, 3600.0, 60.0
# After the last end of a job, so that a retry in this time needs no new values.
_DROP_SECRETS_AFTER_S = 5.0


class LogFile(Struct, frozen=True):
    path: str
    job_id: int
    size: int  # on disk: what was cut out of its middle does not count
    changed_at: float


def list_logs(folders: Iterable[Path]) -> list[LogFile]:
    """Return all logs in these folders, those that changed first at the front. Raises EnvironmentFault if a folder
    cannot be read."""
    found = []
    for folder in folders:
        try:
            with os.scandir(folder) as entries:
                for number, entry in enumerate(entries):
                    match = _NAME.fullmatch(entry.name)
                    if match is not None and entry.is_file(follow_symlinks=False):
                        with contextlib.suppress(FileNotFoundError):  # it was removed since the folder was read
                            status = entry.stat(follow_symlinks=False)
                            size = min(status.st_size, status.st_blocks * 512)
                            found.append(LogFile(entry.path, int(match[1]), size, status.st_mtime))
                    _pause(number)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            problem, hint = f"{folder} cannot be read: {error.strerror}", "see the owner and mode of this folder"
            raise EnvironmentFault(problem, hint=hint) from error
    return sorted(found, key=lambda log: log.changed_at)


def surplus(logs: Sequence[LogFile], kept: Collection[int], old: Collection[int], most: float | None) -> list[LogFile]:
    """Return the logs of the jobs `old`, and the first of the others as long as all together are larger than `most`.
    Logs of the jobs `kept` count, and are never among them."""
    total = sum(log.size for log in logs)
    found = []
    for log in sorted(logs, key=lambda each: each.job_id not in old):
        if log.job_id in kept or (log.job_id not in old and (most is None or total <= most)):
            continue
        total -= log.size
        found.append(log)
    return found


def remove_logs(logs: Iterable[LogFile]) -> tuple[list[LogFile], str | None]:
    """Return the logs that were removed, and why another could not be removed, if so."""
    removed, problem = [], None
    for number, log in enumerate(logs):
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(log.path)
                removed.append(log)
        except OSError as error:
            problem = f"{log.path} cannot be removed: {error.strerror}"
        _pause(number)
    return removed, problem


def _pause(number: int) -> None:
    if number % 100 == 99:
        time.sleep(0.001)


class Retention:
    def __init__(self, scheduler: SchedulerLoop, folder: Path) -> None:
        self._scheduler, self._folder, self._finished = scheduler, folder, -1
        self._has_ended, self._lock = asyncio.Event(), asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "gpuyard-keep")
        self.snapshots = CodeSnapshots(scheduler, folder)
        self._logs: tuple[int, int] | None = None  # number and size of all logs after the last round
        scheduler.listeners.append(self._on_step)

    async def run(self) -> None:
        """Apply the limits a minute after the start, then once an hour. Drop secrets after jobs have ended."""
        loop = asyncio.get_running_loop()
        due = loop.time() + _FIRST_AFTER_S
        await self.snapshots.read_all()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._has_ended.wait()
                    await asyncio.sleep(_DROP_SECRETS_AFTER_S)
            try:
                if loop.time() >= due:
                    due = loop.time() + _EVERY_S
                    await self.apply()
                with convert_sqlite_errors():
                    await self._follow_ends()
                continue
            except GpuyardError as error:
                _log.error("what [keep] in config.toml says cannot be applied now: %s", error)
            except Exception:  # noqa: BLE001 - a bug in one round must not be the last one
                _log.exception("a bug: what [keep] in config.toml says cannot be applied now")
            await asyncio.sleep(_AFTER_FAILURE_S)

    async def _follow_ends(self) -> None:
        """Drop secrets of jobs that have ended, bring results back, and remove snapshots that are not kept at all."""
        if self._has_ended.is_set():
            self._has_ended.clear()
            try:
                await self._work(self._scheduler.store.specs.drop_secrets(), is_urgent=False)
            except BaseException:
                self._has_ended.set()  # try again
                raise
        if self.snapshots.has_ended:
            await self.snapshots.bring_results()
            if load_config().keep.snapshots_s == 0.0:
                async with self._lock:
                    await self.snapshots.remove_old(0.0, partial(self._work, is_urgent=False))

    async def apply(self, older_than_s: float | None = None, *, is_urgent: bool = False) -> CleanResult:
        """Delete jobs that finished longer ago than this, or than [keep] says, and logs that are beyond its limits.
        `is_urgent`: a user waits for it, and it takes more of the loop's time."""
        keep = load_config().keep
        age = keep.jobs_s if older_than_s is None else older_than_s
        async with self._lock:
            with convert_sqlite_errors():
                cleaning = self._scheduler.requests.clean(age) if age is not None else None
                gone = [] if cleaning is None else await self._work(cleaning, is_urgent=is_urgent)
                removed, problem = await self._remove_logs(keep, set(gone))
                await self.snapshots.remove_old(keep.snapshots_s, partial(self._work, is_urgent=is_urgent))
        if gone or removed:
            _log.info("deleted %d finished jobs and %d logs", len(gone), len(removed))
        if problem is not None:
            raise EnvironmentFault(problem, hint="remove it, or see the owner and mode of its folder")
        return CleanResult(jobs=len(gone), logs=len(removed), bytes=sum(log.size for log in removed))

    async def _remove_logs(self, keep: KeepConfig, gone: set[int]) -> tuple[list[LogFile], str | None]:
        in_thread = asyncio.get_running_loop().run_in_executor
        logs = await in_thread(self._thread, list_logs, log_folders(self._folder))
        # Programs of an earlier queue in this folder may still write logs of jobs that this queue does not know.
        running = await in_thread(self._thread, jobs_of_queue, str(self._folder))
        old = gone | await self._ended_before(logs, keep.logs_s)
        # After the logs were listed: each log in the list of a job that was submitted since is of an earlier queue.
        unfinished = self._scheduler.queries.unfinished()
        most = None if keep.most_log_mb is None else keep.most_log_mb * MB

        def remove() -> tuple[list[LogFile], str | None]:
            jobs = {log.job_id for log in logs}
            kept = {each for each in jobs if any(first <= each <= last for first, last in unfinished)}
            return remove_logs(surplus(logs, kept | running.keys(), old, most))

        removed, problem = await in_thread(self._thread, remove)
        size = sum(log.size for log in logs) - sum(log.size for log in removed)
        self._logs = len(logs) - len(removed), size
        return removed, problem

    async def _ended_before(self, logs: Sequence[LogFile], age_s: float | None) -> set[int]:
        """Return the jobs that ended longer ago than this. A step of the wall clock does not make a log old: both its
        file and the queue's clock must say so."""
        if age_s is None:
            return set()
        jobs = list({log.job_id for log in logs if log.changed_at < time.time() - age_s})
        before, found = self._scheduler.clock.now() - age_s, set[int]()
        for start in range(0, len(jobs), PIECE):
            found |= self._scheduler.queries.old_jobs.ended_before(jobs[start : start + PIECE], before)
            await asyncio.sleep(0)
        return found

    def kept_files(self) -> KeptFiles:
        keep, path = load_config().keep, self._scheduler.database.path
        files = (file for file in (path, Path(f"{path}-wal")) if file.exists())
        logs, size = self._logs or (None, None)
        return KeptFiles(
            database_bytes=sum(file.stat().st_size for file in files),
            logs=logs,
            log_bytes=size,
            keep_jobs_s=keep.jobs_s,
            keep_logs_s=keep.logs_s,
            keep_log_bytes=None if keep.most_log_mb is None else int(keep.most_log_mb * MB),
        )

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.snapshots.close()

    def _on_step(self, _: Step) -> None:
        finished = self._scheduler.controller.transitions.finished
        has_work = self._scheduler.store.specs.may_have_secrets or self.snapshots.has_ended
        if finished != self._finished and has_work:
            self._finished = finished
            self._has_ended.set()

    async def _work(self, pieces: InPieces[T], *, is_urgent: bool) -> T:
        rest = 0.0 if is_urgent else 10.0  # it takes a tenth of the loop's time
        return await run_in_pieces(pieces, self._scheduler.checkpoints.may_write, rest=rest)
