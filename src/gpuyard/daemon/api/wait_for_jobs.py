"""Those who wait for jobs to finish. Each remembers how far it has seen: a look costs what has finished since."""

import asyncio
from typing import Any

from gpuyard.core.job.lifecycle import JobState
from gpuyard.store.job_store import JobStore
from gpuyard.store.queue_queries import QueueQueries

_MOST_TOLD = 100
# Jobs may finish a thousand times a second; nobody needs to know sooner than this.
_LOOK_AGAIN_S = 0.01


class JobWaits:
    """Until all jobs in `ranges` are finished."""

    def __init__(self, catalogue: QueueQueries, store: JobStore, ranges: list[tuple[int, int]]) -> None:
        self._catalogue = catalogue
        self._store = store
        self._ranges = ranges
        self._left = list(ranges)

    def is_over(self) -> bool:
        while self._left:
            first, last = self._left[0]
            unfinished = self._catalogue.first_unfinished(first, last)
            if unfinished is not None:
                self._left[0] = (unfinished, last)
                return False
            del self._left[0]
        return True

    def answer(self) -> dict[str, Any]:
        """How it stands. What is left is counted only when all is over, as that takes time."""
        is_done = not self._left
        words = " ".join(f"{first}-{last}" if first != last else str(first) for first, last in self._ranges)
        if not is_done:
            counts = self._store.counts()
            unfinished = sum(count for state, count in counts.items() if state not in _ENDS)
            return {"done": False, "left": unfinished, "running": counts[JobState.RUNNING], "selection": words}
        bad: list[JobState] = [state for state in _ENDS if state is not JobState.SUCCEEDED]
        failed_count = sum(self._catalogue.count_in(self._ranges, state) for state in bad)
        return {
            "done": True,
            "left": 0,
            "running": 0,
            "selection": words,
            "succeeded": self._catalogue.count_in(self._ranges, JobState.SUCCEEDED),
            "failed": self._failed(bad) if failed_count else [],
            "failed_count": failed_count,
        }

    def _failed(self, bad: list[JobState]) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = []
        for first, last in self._ranges:
            for job_id in self._catalogue.ids(first, last, bad):
                job = self._store.job(job_id)
                if job is None or len(told) == _MOST_TOLD:
                    return told
                outcome = job.outcome.kind if job.outcome is not None else None
                told.append({"id": job_id, "state": str(job.state), "outcome": outcome, "reason": job.reason})
        return told


class FinishSignal:
    """Wakes those who wait when jobs finish, no more often than anybody needs."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def tell(self) -> None:
        """Some have finished."""
        if self._waiters and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self._wake)

    async def wait(self, waiting: JobWaits, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not waiting.is_over() and (left := deadline - loop.time()) > 0:
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.add(waiter)
            try:
                await asyncio.wait([waiter], timeout=left)
            finally:
                self._waiters.discard(waiter)

    def _wake(self) -> None:
        self._timer = None
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


_ENDS = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.REJECTED)
