"""Watches the progress of running jobs beside the scheduler's loop.

- A thread reads the logs and files that have grown, every 2 s; the more jobs run, the more seldom, up to every 30 s.
  The loop only gets what was found. While no job runs there is no timer and no thread.
- An attempt that has ended is read once more, for its last figures. While very short jobs end in great number, most of
  them are not.
- A disk that hangs holds up its thread alone: after 5 s the folder is left alone until that thread comes back, and
  another thread reads the rest. At most 4 threads may hang; then nothing is read.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from gpuyard.control.step_result import Step
from gpuyard.core.job.job import Attempt, PublishedEventKind
from gpuyard.core.progress.job_progress import ProgressReading
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.monitor.read_progress import AttemptProgress, ProgressSource
from gpuyard.engines.common.job_logs import progress_file_of
from gpuyard.errors import EnvironmentFault
from gpuyard.store.database import convert_sqlite_errors

_log = logging.getLogger(__name__)
_EVERY_S, _PER_JOB_S, _LONGEST_S = 2.0, 0.05, 30.0
_SOON_S = 0.2
_HUNG_S, _MOST_HUNG = 5.0, 4
# Attempts that ran for less time are read at their end only while few wait for that.
_SHORT_S, _MOST_SHORT, _MOST_ENDED = 1.0, 32, 1000
# Between two logs: other threads wait 5 ms for Python's global lock unless its holder sleeps.
_PAUSE_S = 0.0005

Found = tuple[ProgressSource, ProgressReading]


class ReadingRound:
    """One pass over the sources, in a thread of its own."""

    def __init__(self, sources: Sequence[ProgressSource], states: dict[tuple[int, int], AttemptProgress]) -> None:
        self._sources = sources
        self._states = states
        self.found: list[Found] = []
        self.is_given_up = False
        self.current: ProgressSource | None = None
        self.since = time.monotonic()

    def run(self, read: Callable[[AttemptProgress, ProgressSource], ProgressReading | None]) -> None:
        for source in self._sources:
            self.current, self.since = source, time.monotonic()
            reading = read(self._states[source.key], source)
            if reading is not None:
                self.found.append((source, reading))
            if self.is_given_up:
                return
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
        self._states: dict[tuple[int, int], AttemptProgress] = {}
        self._ended: list[ProgressSource] = []
        self._short = 0
        self._round: ReadingRound | None = None
        self._hung: list[ReadingRound] = []
        scheduler.listeners.append(self._on_step)

    def _on_step(self, step: Step) -> None:
        for event in step.events:
            if event.kind is PublishedEventKind.ENDED and event.attempt is not None:
                self._note_end(event.attempt)
        if self._ended:
            self._set_timer(_SOON_S)
        elif self._scheduler.controller.transitions.live:
            self._set_timer(self._interval_s())

    def _note_end(self, attempt: Attempt) -> None:
        if attempt.started is None or len(self._ended) >= _MOST_ENDED:
            return
        is_short = attempt.ran_s(attempt.ended_at or attempt.since) < _SHORT_S
        if is_short and self._short >= _MOST_SHORT:
            return
        self._short += is_short
        source = self._source_of(attempt)
        if is_short and self._is_empty(source):
            return
        self._ended.append(replace(source, is_over=True))

    def _is_empty(self, source: ProgressSource) -> bool:
        """Return whether an attempt has written nothing. Looks at files of the queue alone: no disk of these hangs."""
        own = f"{self._folders[0]}{os.sep}"
        return all(path.startswith(own) and not _size_of(path) for path in (*source.logs, *source.files))

    def _interval_s(self) -> float:
        return min(_LONGEST_S, max(_EVERY_S, _PER_JOB_S * len(self._scheduler.controller.transitions.live)))

    def _set_timer(self, seconds: float) -> None:
        """Start a round within this time, or earlier if that was planned before."""
        due = self._loop.time() + seconds
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._start_round)

    # Rounds

    def _start_round(self) -> None:
        self._timer = None
        if self._round is not None and time.monotonic() - self._round.since > _HUNG_S:
            self._give_up(self._round)
        if self._round is None and len(self._hung) < _MOST_HUNG:
            sources = list(self._readable(self._sources()))
            if sources:
                self._begin(sources)
        if self._round is not None or self._scheduler.controller.transitions.live:
            self._set_timer(self._interval_s())

    def _begin(self, sources: Sequence[ProgressSource]) -> None:
        keys = {source.key for source in sources}
        self._states = {key: state for key, state in self._states.items() if key in keys}
        for key in keys - self._states.keys():
            self._states[key] = AttemptProgress()
        current = self._round = ReadingRound(sources, self._states)
        threading.Thread(target=self._work, args=(current,), name="gpuyard-progress", daemon=True).start()

    def _work(self, current: ReadingRound) -> None:
        try:
            current.run(self._read)
        finally:  # also after a bug, whose traceback is in the daemon's log
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._finish, current)

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

    def _finish(self, current: ReadingRound) -> None:
        if current in self._hung:
            self._hung.remove(current)
        elif self._round is current:
            self._round = None
        tracker, now = self._scheduler.controller.progress_tracker, self._scheduler.clock.now()
        for source, reading in current.found:
            if not source.is_over:
                tracker.note(source.job_id, source.number, reading, now)
        last = [(source, reading) for source, reading in current.found if source.is_over]
        self._scheduler.checkpoints.when_writable(partial(self._record_last, last))
        if self._ended:
            self._set_timer(_SOON_S)

    def _record_last(self, found: Sequence[Found]) -> None:
        if not found:
            return
        controller, store = self._scheduler.controller, self._scheduler.store
        try:
            with convert_sqlite_errors(), controller.transitions.in_step(), store.transaction():
                for source, reading in found:
                    controller.progress_tracker.note_last(source.job_id, source.number, reading)
        except EnvironmentFault as error:
            _log.warning("the last figures of %d jobs are lost: %s", len(found), error)
        self._scheduler.wake()  # those who look at these jobs see the figures

    # Sources

    def _sources(self) -> Iterator[ProgressSource]:
        for live in self._scheduler.controller.transitions.live.values():
            if live.attempt.started is not None:
                yield self._source_of(live.attempt)
        ended, self._ended, self._short = self._ended, [], 0
        yield from ended

    def _readable(self, sources: Iterable[ProgressSource]) -> Iterator[ProgressSource]:
        hung = {folder for each in self._hung if each.current is not None for folder in each.current.folders}
        return (source for source in sources if not source.folders & hung)

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
