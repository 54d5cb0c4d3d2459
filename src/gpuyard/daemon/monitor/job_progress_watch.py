"""Watches the progress of running jobs beside the scheduler's loop.

- A thread reads the logs and progress files that have grown, every 2 s; the more jobs run, the more seldom, up to
  every 30 s. Every read is bounded.
- An attempt that has ended is read before all others, and its end is recorded after that. One that ran for less than
  1 s is read without a thread.
- A disk that hangs holds up its thread alone: after 5 s the folder is left alone until that thread comes back, the
  ends of attempts there are recorded without their last figures, and another thread reads the rest, at most 4 in all.
"""

import asyncio
import contextlib
import logging
import os
import re
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.engines.common.job_logs import OpenLog, open_log, progress_file_of
from gpuyard.engines.common.spawn_program import headline
from gpuyard.model.job import Attempt, PublishedEventKind
from gpuyard.model.job_progress import NamedValues, ProgressReading, WorkDone
from gpuyard.output.progress_line import LONGEST_FILE, read_progress_line
from gpuyard.output.progress_reader import LogReader, advance
from gpuyard.queue.step import Step
from gpuyard.system.worker_threads import BackgroundThread

FIRST_BYTES, NEXT_BYTES = 256 << 10, 64 << 10


class ProgressSource(Struct, frozen=True, kw_only=True):
    """Where an attempt may say how far it is. `is_over`: its last line is whole. `is_recorded`: its end is recorded, so
    its progress files are removed."""

    job_id: int
    number: int
    logs: tuple[str, ...]
    files: tuple[str, ...]
    is_over: bool = False
    is_recorded: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return self.job_id, self.number

    @property
    def folders(self) -> frozenset[str]:
        return frozenset(map(os.path.dirname, (*self.logs, *self.files)))


class _LogState(Struct):
    reader: LogReader = LogReader()
    end: int | None = None  # up to where it was read; None: nothing yet


class AttemptProgress:
    """What was read of one attempt so far. `first_bytes`: of a log that is read for the first time, this much."""

    def __init__(self, first_bytes: int = FIRST_BYTES) -> None:
        self._first_bytes = first_bytes
        self._logs: dict[str, _LogState] = {}
        self._files: dict[str, tuple[int, int]] = {}  # change time and size of what was read last
        self._is_told = False

    def read(self, source: ProgressSource) -> ProgressReading | None:
        """Return what is new, or None. Raises nothing: what cannot be read says nothing."""
        if source.is_recorded:
            for path in source.files:
                with contextlib.suppress(OSError):
                    os.unlink(path)
            return None
        told = next(filter(None, (self._read_file(path) for path in source.files)), None)
        self._is_told = self._is_told or told is not None
        if self._is_told:
            return told
        amount: WorkDone | None = None
        figures: list[NamedValues] = []
        for path in source.logs:
            found, named = self._read_log(path, source)
            amount, figures = found or amount, [*figures, *named]
        return ProgressReading(amount=amount, figures=figures) if amount is not None or figures else None

    def _read_file(self, path: str) -> ProgressReading | None:
        try:
            status = os.stat(path)
            stamp = status.st_mtime_ns, status.st_size
            if self._files.get(path) == stamp:
                return None
            with open_log(path) as file:
                text = file.read(0, LONGEST_FILE).decode(errors="replace")
        except OSError:
            return None
        reading = read_progress_line(text)
        if reading is not None:  # else it is being written
            self._files[path] = stamp
        return reading

    def _read_log(self, path: str, source: ProgressSource) -> tuple[WorkDone | None, list[NamedValues]]:
        state = self._logs.setdefault(path, _LogState())
        try:
            if os.stat(path).st_size == state.end and not source.is_over:
                return None, []
            with open_log(Path(path)) as log:
                text = self._new_text(log, state, headline(str(source.job_id), str(source.number)))
        except OSError:
            return None, []
        text += "\n" if source.is_over and state.end else ""
        if not text:
            return None, []
        state.reader, figures = advance(state.reader, text)
        return state.reader.amount(), list(figures)

    def _new_text(self, log: OpenLog, state: _LogState, headline_of_attempt: str) -> str:
        """Return what was written since the last call. Of a file of the user, what was there before the attempt does
        not count."""
        end = log.end
        if state.end is None or end < state.end:
            at = max(log.first, end - self._first_bytes)
            text = log.text(at, end)
            if at > log.first:
                text = re.split("[\r\n]", text, maxsplit=1)[-1]
            state.reader, state.end = LogReader(), end
            return text.rpartition(headline_of_attempt)[2]
        at = max(log.after_hole(state.end), end - NEXT_BYTES)
        if at != state.end:  # the rest of the last line is skipped
            state.reader = replace(state.reader, last_line="")
        state.end = end
        return log.text(at, end)


_log = logging.getLogger(__name__)
_EVERY_S, _HUNG_S = 2.0, 5.0


class ProgressWatch:
    def __init__(
        self,
        scheduler: SchedulerLoop,
        folders: Sequence[Path],
        read: Callable[[AttemptProgress, ProgressSource], ProgressReading | None] = AttemptProgress.read,
    ) -> None:
        """`folders` are those of logs: the queue's own first, then those that cluster nodes see."""
        self._scheduler, self._folders, self._read = scheduler, folders, read
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._states: dict[tuple[int, int], AttemptProgress] = {}
        self._ends: deque[ProgressSource] = deque()  # of attempts that are over
        self._sources: deque[ProgressSource] = deque()
        self._thread = BackgroundThread("gpuyard-progress")
        self._reading: asyncio.Task[None] | None = None
        self._hung: list[ProgressSource] = []
        scheduler.controller.progress_tracker.read_rest = self._read_rest
        scheduler.listeners.append(self._on_step)

    def _on_step(self, step: Step) -> None:
        for event in step.events:
            usage = None if event.attempt is None else event.attempt.usage
            if event.kind is not PublishedEventKind.ENDED or event.attempt is None or usage is None:
                continue
            if usage.progress is not None and usage.progress.is_told:  # its progress files are to be removed
                self._sources.append(replace(self._source_of(event.attempt), is_recorded=True))
                self._start_reading()
        self._set_timer()

    def _read_rest(self, attempt: Attempt) -> bool:
        """Read what an attempt that is over has written. Return False if a thread does that."""
        source = replace(self._source_of(attempt), is_over=True)
        own = f"{self._folders[0]}{os.sep}"  # on a local disk, which does not hang
        paths = (*source.logs, *source.files)
        is_own = all(path.startswith(own) for path in paths)
        if attempt.started is None or not self._can_read(source):
            return True
        if is_own and not any(os.path.exists(path) and os.path.getsize(path) for path in paths):
            return True
        is_short = attempt.ran_s(self._scheduler.clock.now()) < 1.0
        if is_own and is_short and source.key not in self._states:
            reading = self._read(AttemptProgress(2 << 10), source)
            self._scheduler.controller.progress_tracker.note_rest(source.key, reading)
            return True
        self._ends.append(source)
        self._start_reading()
        return False

    def _set_timer(self) -> None:
        """Look at all live attempts after a while, or earlier if that was planned before."""
        if not (live := self._scheduler.controller.transitions.live):
            return
        due = self._loop.time() + min(30.0, max(_EVERY_S, 0.05 * len(live)))
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        lives = self._scheduler.controller.transitions.live.values()
        if not self._sources:
            self._sources.extend(self._source_of(live.attempt) for live in lives if live.attempt.started is not None)
            self._start_reading()
        self._set_timer()

    def _start_reading(self) -> None:
        if self._reading is None:
            self._reading = self._loop.create_task(self._read_all())

    async def _read_all(self) -> None:
        while left := self._ends or self._sources:
            source = left.popleft()
            self._note(source, await self._read_one(source) if self._can_read(source) else None)
        self._reading = None
        live = self._scheduler.controller.transitions.live.items()
        keys = {(job_id, each.attempt.number) for job_id, each in live}
        self._states = {key: state for key, state in self._states.items() if key in keys}

    async def _read_one(self, source: ProgressSource) -> ProgressReading | None:
        """Read in the thread. Leave it alone if the disk does not answer, and go on with another one."""
        state = self._states.setdefault(source.key, AttemptProgress())
        try:
            call = self._thread.run(partial(self._read, state, source))
        except RuntimeError:  # no more threads
            return None
        done, _ = await asyncio.wait([call], timeout=_HUNG_S)
        if done and call.exception() is None:
            return call.result()
        self._thread.close()
        self._thread = BackgroundThread("gpuyard-progress")
        if done:  # a bug, which ended the thread; its traceback is in the log
            return None
        self._hung.append(source)
        call.add_done_callback(lambda _: self._hung.remove(source))
        self._states.pop(source.key, None)  # the thread goes on with the state
        folders = ", ".join(sorted(source.folders))
        _log.warning("%s does not answer: the progress of jobs with logs there is not read", folders)
        return None

    def _note(self, source: ProgressSource, reading: ProgressReading | None) -> None:
        tracker = self._scheduler.controller.progress_tracker
        if source.is_over:
            self._states.pop(source.key, None)
            tracker.note_rest(source.key, reading)
            self._scheduler.wake()
        elif reading is not None:
            tracker.note(*source.key, reading, self._scheduler.clock.now())

    def _can_read(self, source: ProgressSource) -> bool:
        """Return whether a thread is left to read it, and none hangs in its folders."""
        hung = {folder for each in self._hung for folder in each.folders}
        return len(self._hung) < 4 and not source.folders & hung

    def _source_of(self, attempt: Attempt) -> ProgressSource:
        folders = self._folders if attempt.engine else self._folders[:1]
        logs = tuple(path for path in (attempt.log, attempt.error_log) if path is not None and os.path.isabs(path))
        files = tuple(progress_file_of(folder, attempt.key) for folder in folders)
        return ProgressSource(job_id=attempt.job_id, number=attempt.number, logs=logs, files=files)
