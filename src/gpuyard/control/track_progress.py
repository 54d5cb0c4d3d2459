"""Keeps the progress of attempts, and says when they end by it.

The readings come from outside: a thread reads output and files (`daemon/monitor/progress_watch.py`). An end is recorded
after the rest of what its attempt has written was read, with what that says.
"""

from collections.abc import Callable, Collection

from msgspec.structs import replace

from gpuyard.control.live_jobs import Live
from gpuyard.control.transitions import JobTransitions
from gpuyard.core.job.job import Attempt, Usage
from gpuyard.core.progress.job_progress import JobProgress, ProgressReading, add_reading


class ProgressTracker:
    def __init__(self, transitions: JobTransitions) -> None:
        self._transitions = transitions
        # Reads what an attempt that is over has written, and calls `note_rest` if it says something. Returns False if
        # that takes a while: then it calls it in any case, and wakes the loop.
        self.read_rest: Callable[[Attempt], bool] = lambda _: True
        self._rest: dict[tuple[int, int], ProgressReading | None] = {}
        self._unread: set[tuple[int, int]] = set()

    def note(self, job_id: int, number: int, reading: ProgressReading, now: float) -> None:
        """Add a reading of a live attempt. One of an attempt that is over changes nothing."""
        live = self._transitions.live.get(job_id)
        if live is not None and live.attempt.number == number:
            usage = live.attempt.usage or Usage()
            progress = add_reading(usage.progress or JobProgress(), reading, live.attempt.ran_s(now))
            self._transitions.note_usage(job_id, replace(usage, progress=progress))

    def is_read(self, attempt: Attempt) -> bool:
        """Return whether all was read that an attempt which is over has written. If not, a step follows when it was."""
        key = attempt.job_id, attempt.number
        if key not in self._rest:
            self._rest[key] = None  # a bug in reading keeps no end from being recorded
            if not self.read_rest(attempt):
                self._unread.add(key)
        return key not in self._unread

    def note_rest(self, key: tuple[int, int], reading: ProgressReading | None) -> None:
        """Keep the last reading of an attempt (job and number) until its end is recorded. None: it could not be read,
        or says nothing."""
        if key in self._rest:
            self._rest[key] = self._rest[key] or reading
            self._unread.discard(key)

    def add_rest(self, live: Live, ended_at: float) -> None:
        reading = self._rest.get((live.job.id, live.attempt.number))
        if reading is not None:
            self.note(live.job.id, live.attempt.number, reading, ended_at)

    def forget(self, recorded: Collection[tuple[int, int]]) -> None:
        for key in recorded:
            self._rest.pop(key, None)
