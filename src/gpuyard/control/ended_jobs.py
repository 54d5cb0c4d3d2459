"""Ends of attempts that are stored together: a step of short jobs records dozens of them."""

import contextlib
from collections.abc import Iterator

from gpuyard.control.dependants import Dependants
from gpuyard.store.ended_job import EndedJob
from gpuyard.store.job_store import JobStore


class EndedJobs:
    """Stores each end at once or, in a block of `together`, all of them when it is over. Only then are dependants
    settled, which reads the states of jobs."""

    def __init__(self, store: JobStore, dependants: Dependants) -> None:
        self._store = store
        self._dependants = dependants
        self._unstored: list[EndedJob] = []
        self._is_gathering = False

    def clear(self) -> None:
        """Forget what a transaction that failed has not stored."""
        self._unstored.clear()

    def add(self, end: EndedJob) -> None:
        self._unstored.append(end)
        if not self._is_gathering:
            self._store_all()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        self._is_gathering = True
        try:
            yield
        finally:
            self._is_gathering = False
        self._store_all()

    def _store_all(self) -> None:
        ends, self._unstored = self._unstored, []
        self._store.end_attempts(ends)
        for end in ends:
            if end.ended_at is not None:
                self._dependants.settle(end.attempt.job_id, end.ended_at)
