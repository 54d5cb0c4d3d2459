"""Keeps the progress of attempts, and says when they end by it.

The readings come from outside: a thread reads output and files (`daemon/monitor/progress_watch.py`).
"""

from msgspec.structs import replace

from gpuyard.control.live_jobs import Live
from gpuyard.control.transitions import JobTransitions
from gpuyard.core.job.job import Usage
from gpuyard.core.progress.job_progress import JobProgress, ProgressReading, RemainingTime, add_reading, time_left


class ProgressTracker:
    def __init__(self, transitions: JobTransitions) -> None:
        self._transitions = transitions

    def note(self, job_id: int, number: int, reading: ProgressReading, now: float) -> None:
        """Add a reading of a live attempt. One of an attempt that is over changes nothing."""
        live = self._transitions.live.get(job_id)
        if live is not None and live.attempt.number == number:
            usage = with_reading(live.attempt.usage, reading, live.attempt.ran_s(now))
            self._transitions.note_usage(job_id, usage)

    def note_last(self, job_id: int, number: int, reading: ProgressReading) -> None:
        """Add the last reading of an attempt that is over. Call it in a transaction."""
        store = self._transitions.store
        attempt = next((each for each in store.attempts(job_id) if each.number == number), None)
        if attempt is not None and attempt.ended_at is not None:
            usage = with_reading(attempt.usage, reading, attempt.ran_s(attempt.ended_at))
            store.update_attempt(replace(attempt, usage=usage))


def with_reading(usage: Usage | None, reading: ProgressReading, ran_s: float) -> Usage:
    usage = usage or Usage()
    return replace(usage, progress=add_reading(usage.progress or JobProgress(), reading, ran_s))


def time_left_of(live: Live, now: float) -> RemainingTime | None:
    """Return how long a live attempt still needs by its own progress, or None."""
    usage = live.attempt.usage
    progress = None if usage is None else usage.progress
    return None if progress is None else time_left(progress, live.attempt.ran_s(now))
