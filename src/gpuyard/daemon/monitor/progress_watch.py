"""Watches the progress of running jobs beside the scheduler's loop.

- A thread reads the logs and files that have grown, every 2 s; the more jobs run, the more seldom, up to every 30 s.
  The loop only gets what was found. While no job runs there is no timer and no thread.
- An attempt that has ended is read before all others, and its end is recorded after that. One that has written nothing
  is not read. Of one that ran for less than 1 s, the last 2 KB in the queue's own logs are read without a thread: they
  are in memory, and thousands of short jobs may end in a minute.
- A disk that hangs holds up its thread alone: after 5 s the folder is left alone until that thread comes back, the ends
  of attempts there are recorded without their last figures, and another thread reads the rest. At most 4 threads may
  hang; then nothing is read.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from msgspec.structs import replace

from gpuyard.control.step_result import Step
from gpuyard.core.job.job import Attempt, PublishedEventKind
from gpuyard.core.progress.job_progress import ProgressReading
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.monitor.read_progress import AttemptProgress, ProgressSource
from gpuyard.engines.common.job_logs import progress_file_of

_log = logging.getLogger(__name__)
_EVERY_S, _PER_JOB_S, _LONGEST_S = 2.0, 0.05, 30.0
_HUNG_S, _MOST_HUNG = 5.0, 4
_SHORT_S, _BYTES_OF_SHORT = 1.0, 2 << 10
# Between two logs: other threads wait 5 ms for Python's global lock unless its holder sleeps.
_PAUSE_S = 0.0005


class ReadingRound:
    """What one thread reads: attempts that are over first. More may be added while it reads."""

    def __init__(self, ends: Iterable[ProgressSource], sources: Iterable[ProgressSource]) -> None:
        self.ends = deque(ends)
        self.sources = deque(sources)
        self.is_given_up = False
        self.current: ProgressSource | None = None
        self.since = time.monotonic()

    def run(self, read: Callable[[ProgressSource], None]) -> None:
        while not self.is_given_up and (left := self.ends or self.sources):
            self.since, self.current = time.monotonic(), left.popleft()
            read(self.current)
            time.sleep(_PAUSE_S)


class ProgressWatch:
    def __init__(
        self,
        scheduler: SchedulerLoop,
        folders: Sequence[Path],
        read: Callable[[AttemptProgress, ProgressSource], ProgressReading | None] = AttemptProgress.read,
    ) -> None:
        """`folders` are those of logs: the queue's own first, then those that cluster nodes see."""
        self._scheduler = scheduler
        self._folders = folders
        self._read = read
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._watchdog: asyncio.TimerHandle
        self._states: dict[tuple[int, int], AttemptProgress] = {}
        self._round: ReadingRound | None = None
        self._hung: list[ReadingRound] = []
        scheduler.controller.progress_tracker.read_rest = self._read_rest
        scheduler.listeners.append(self._on_step)

    def _on_step(self, step: Step) -> None:
        for event in step.events:
            if event.kind is PublishedEventKind.ENDED and event.attempt is not None:
                self._remove_files(event.attempt)
        if self._scheduler.controller.transitions.live:
            self._set_timer(self._interval_s())

    def _remove_files(self, attempt: Attempt) -> None:
        """Have the progress files of an attempt removed: its end is recorded."""
        progress = None if attempt.usage is None else attempt.usage.progress
        if progress is not None and progress.is_told:
            self._add(sources=[replace(self._source_of(attempt), is_recorded=True)])

    def _read_rest(self, attempt: Attempt) -> bool:
        """Read what an attempt that is over has written. Return False if a thread does that."""
        source = replace(self._source_of(attempt), is_over=True)
        own = f"{self._folders[0]}{os.sep}"  # on a local disk, which does not hang
        paths = (*source.logs, *source.files)
        is_own = all(path.startswith(own) for path in paths)
        if attempt.started is None or (is_own and not any(map(_size_of, paths))) or not self._can_read(source):
            return True
        is_short = attempt.ran_s(self._scheduler.clock.now()) < _SHORT_S
        if is_own and is_short and source.key not in self._states:
            reading = self._read(AttemptProgress(_BYTES_OF_SHORT), source)
            self._scheduler.controller.progress_tracker.note_rest(source.key, reading)
            return True
        self._add(ends=[source])
        return False

    def _interval_s(self) -> float:
        return min(_LONGEST_S, max(_EVERY_S, _PER_JOB_S * len(self._scheduler.controller.transitions.live)))

    def _set_timer(self, seconds: float) -> None:
        """Look at all live attempts within this time, or earlier if that was planned before."""
        due = self._loop.time() + seconds
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._on_timer)

    # Rounds

    def _on_timer(self) -> None:
        self._timer = None
        lives = self._scheduler.controller.transitions.live.values()
        if self._round is None or not self._round.sources:
            self._add(sources=[self._source_of(live.attempt) for live in lives if live.attempt.started is not None])
        if lives:
            self._set_timer(self._interval_s())

    def _add(self, *, ends: Iterable[ProgressSource] = (), sources: Iterable[ProgressSource] = ()) -> None:
        """Have these read, those that can be, by the thread that reads now or by a new one."""
        ends, sources = (list(filter(self._can_read, each)) for each in (ends, sources))
        if self._round is not None:
            self._round.ends.extend(ends)
            self._round.sources.extend(sources)
        elif ends or sources:
            self._begin(ReadingRound(ends, sources))

    def _begin(self, current: ReadingRound) -> None:
        try:
            threading.Thread(target=self._work, args=(current,), name="gpuyard-progress", daemon=True).start()
        except RuntimeError:  # no more threads
            for source in current.ends:
                self._loop.call_soon(self._note, source, None)
            return
        self._round = current
        self._watchdog = self._loop.call_later(_HUNG_S, self._watch, current)

    def _watch(self, current: ReadingRound) -> None:
        """Give up a round that has read one attempt for too long."""
        if (left_s := current.since + _HUNG_S - time.monotonic()) > 0:
            self._watchdog = self._loop.call_later(left_s, self._watch, current)
        else:
            self._give_up(current)

    def _work(self, current: ReadingRound) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            try:
                current.run(self._read_source)
            finally:  # also after a bug, whose traceback is in the daemon's log
                self._loop.call_soon_threadsafe(self._finish, current)

    def _read_source(self, source: ProgressSource) -> None:
        reading = self._read(self._states.setdefault(source.key, AttemptProgress()), source)
        if reading is not None or source.is_over:
            self._loop.call_soon_threadsafe(self._note, source, reading)

    def _note(self, source: ProgressSource, reading: ProgressReading | None) -> None:
        tracker = self._scheduler.controller.progress_tracker
        if not source.is_over and reading is not None:
            tracker.note(*source.key, reading, self._scheduler.clock.now())
        elif source.is_over:
            self._states.pop(source.key, None)
            tracker.note_rest(source.key, reading)
            self._scheduler.wake()

    def _give_up(self, current: ReadingRound) -> None:
        """Leave a round alone whose disk does not answer."""
        current.is_given_up = True
        self._hung.append(current)
        self._round = None
        # Its thread goes on with the state of the attempt that it reads now.
        if current.current is not None:
            self._states.pop(current.current.key, None)
            folders = ", ".join(sorted(current.current.folders))
            _log.warning("%s does not answer: the progress of jobs with logs there is not read", folders)
        ends = current.ends.copy()
        for source in (current.current, *ends):
            if source is not None and source.is_over and not self._can_read(source):
                self._note(source, None)
        self._add(ends=ends)

    def _finish(self, current: ReadingRound) -> None:
        if current in self._hung:
            self._hung.remove(current)
        else:
            self._round = None
            self._watchdog.cancel()
            if current.current is not None and current.current.is_over:
                self._note(current.current, None)  # a bug; else it is noted
            keys = {
                (job_id, live.attempt.number) for job_id, live in self._scheduler.controller.transitions.live.items()
            }
            self._states = {key: state for key, state in self._states.items() if key in keys}
            self._add(ends=current.ends, sources=current.sources)

    def _can_read(self, source: ProgressSource) -> bool:
        """Return whether a thread is left to read it, and none hangs in its folders."""
        hung = {folder for each in self._hung if each.current is not None for folder in each.current.folders}
        return len(self._hung) < _MOST_HUNG and not source.folders & hung

    def _source_of(self, attempt: Attempt) -> ProgressSource:
        folders = self._folders if attempt.engine else self._folders[:1]
        logs = tuple(path for path in (attempt.log, attempt.error_log) if path is not None and os.path.isabs(path))
        files = tuple(progress_file_of(folder, attempt.key) for folder in folders)
        return ProgressSource(job_id=attempt.job_id, number=attempt.number, logs=logs, files=files)


def _size_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
