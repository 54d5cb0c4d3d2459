"""Jobs that nothing will start: held, suspended by a user, or waiting for such jobs alone.

A wait for them would never end. A blocked job is stuck if all jobs that it still waits for are: else one of them may
end, which lets it start or rejects it.
"""

from collections.abc import Callable, Iterator, Sequence

from gpuyard.core.job.dependencies import MOST_NAMED, awaited
from gpuyard.core.job.lifecycle import FINISHED, JobState
from gpuyard.core.job.selection import format_ids
from gpuyard.schema.queue import StuckJob
from gpuyard.store.job_store import JobStore
from gpuyard.store.queue_queries import QueueQueries

_MAY_BE_STUCK = (JobState.HELD, JobState.BLOCKED, JobState.SUSPENDED)
_MOVING = sorted(set(JobState) - FINISHED - set(_MAY_BE_STUCK))


class StuckJobs:
    """Finds stuck jobs. `is_suspended_by_user` says whether only a user resumes a suspended job."""

    def __init__(self, queries: QueueQueries, store: JobStore, is_suspended_by_user: Callable[[int], bool]) -> None:
        self._queries = queries
        self._store = store
        self._is_suspended_by_user = is_suspended_by_user

    def are_all_stuck(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Return whether some jobs of these ranges are unfinished, and all of those are stuck."""
        if any(self._queries.has_any(first, last, _MOVING) for first, last in ranges):
            return False
        known: dict[int, bool] = {}
        is_any = False
        for job_id, state in self._candidates(ranges):
            is_any = True
            if not self._is_stuck(job_id, state, known):
                return False
        return is_any

    def find(self, ranges: Sequence[tuple[int, int]], most: int) -> tuple[list[StuckJob], int]:
        """Return the first stuck jobs, and how many there are. All unfinished jobs of the ranges must be stuck."""
        count = sum(self._queries.count_in(ranges, state) for state in _MAY_BE_STUCK)
        found: list[StuckJob] = []
        for job_id, state in self._candidates(ranges):
            if len(found) == most:
                break
            found.append(StuckJob(id=job_id, state=state, reason=self._reason(job_id, state)))
        return found, count

    def _candidates(self, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, JobState]]:
        for first, last in ranges:
            for job_id in self._queries.ids(first, last, _MAY_BE_STUCK):
                state = self._store.states_of([job_id]).get(job_id)
                if state is not None:
                    yield job_id, state

    def _is_stuck(self, job_id: int, state: JobState, known: dict[int, bool]) -> bool:
        """Return whether a job is stuck; `known` keeps the answers. Job ids grow along dependencies, so this ends."""
        found = known.get(job_id)
        if found is None:
            if state is JobState.BLOCKED:
                others = awaited(self._store.dependencies(job_id))
                found = bool(others) and all(self._is_stuck(other, its, known) for other, _, its in others)
            else:
                found = state is JobState.HELD or (state is JobState.SUSPENDED and self._is_suspended_by_user(job_id))
            known[job_id] = found
        return found

    def _reason(self, job_id: int, state: JobState) -> str:
        if state is JobState.HELD:
            return f"`gpuyard release {job_id}` lets it start"
        if state is JobState.SUSPENDED:
            return f"`gpuyard resume {job_id}` continues it"
        others = [other for other, _, _ in awaited(self._store.dependencies(job_id))]
        return f"it waits for {format_ids(others[:MOST_NAMED])}"
