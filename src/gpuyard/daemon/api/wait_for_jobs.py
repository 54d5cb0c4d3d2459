"""Waiting for jobs to finish. A wait remembers its progress: each check costs only what has finished since the last."""

from typing import Literal

from gpuyard.core.job.lifecycle import FINISHED, JobState
from gpuyard.daemon.api.codec import MOST_LISTED
from gpuyard.daemon.api.stuck_jobs import StuckJobs
from gpuyard.schema.queue import UnsuccessfulJob, WaitResult
from gpuyard.store.job_store import JobStore
from gpuyard.store.queue_queries import QueueQueries

# Beyond this many jobs, the counts of the whole queue stand for theirs.
_MOST_COUNTED = 20_000
_UNSUCCESSFUL = sorted(FINISHED - {JobState.SUCCEEDED})


class JobWaits:
    """A wait until all jobs in `ranges` have finished; with `stuck`, or until only jobs are left that nothing will
    start. `chosen_by` says how the jobs were selected."""

    def __init__(
        self,
        queries: QueueQueries,
        store: JobStore,
        ranges: list[tuple[int, int]],
        stuck: StuckJobs | None = None,
        chosen_by: Literal["ids", "shell", "all"] = "ids",
    ) -> None:
        self._queries = queries
        self._store = store
        self._ranges = ranges
        self._left = list(ranges)
        self._stuck = stuck
        self._chosen_by = chosen_by
        self._is_stuck = False

    def is_over(self) -> bool:
        is_done = self._are_all_finished()
        self._is_stuck = not is_done and self._stuck is not None and self._stuck.are_all_stuck(self._left)
        return is_done or self._is_stuck

    def _are_all_finished(self) -> bool:
        while self._left:
            first, last = self._left[0]
            unfinished = self._queries.first_unfinished(first, last)
            if unfinished is not None:
                self._left[0] = (unfinished, last)
                return False
            del self._left[0]
        return True

    def answer(self) -> WaitResult:
        """Return the result so far. Results are counted only when all jobs have finished, because that takes time."""
        selection = " ".join(f"{first}-{last}" if first != last else str(first) for first, last in self._ranges)
        if self._left and not self._is_stuck:
            left, running = self._count_left()
            return WaitResult(done=False, left=left, running=running, selection=selection, chosen_by=self._chosen_by)
        failed_count = sum(self._queries.count_in(self._ranges, state) for state in _UNSUCCESSFUL)
        stuck, stuck_count = self._stuck.find(self._left, MOST_LISTED) if self._stuck and self._is_stuck else ([], 0)
        return WaitResult(
            done=not self._is_stuck,
            left=stuck_count,
            running=0,
            selection=selection,
            succeeded=self._queries.count_in(self._ranges, JobState.SUCCEEDED),
            failed=self._unsuccessful() if failed_count else [],
            failed_count=failed_count,
            chosen_by=self._chosen_by,
            is_stuck=self._is_stuck,
            stuck=stuck,
            stuck_count=stuck_count,
        )

    def _count_left(self) -> tuple[int, int]:
        """Return how many of the jobs are unfinished, and how many run; of a great many, of the whole queue."""
        if sum(last - first + 1 for first, last in self._left) <= _MOST_COUNTED:
            counted = [self._queries.counts_in(first, last) for first, last in self._left]
        else:
            counted = [self._store.counts()]
        left = sum(count for each in counted for state, count in each.items() if state not in FINISHED)
        return left, sum(each.get(JobState.RUNNING, 0) for each in counted)

    def _unsuccessful(self) -> list[UnsuccessfulJob]:
        found: list[UnsuccessfulJob] = []
        for first, last in self._ranges:
            for job_id in self._queries.ids(first, last, _UNSUCCESSFUL):
                job = self._store.job(job_id)
                if job is None or len(found) == MOST_LISTED:
                    return found
                outcome = job.outcome.kind if job.outcome is not None else None
                found.append(UnsuccessfulJob(id=job_id, state=job.state, outcome=outcome, reason=job.reason))
        return found
