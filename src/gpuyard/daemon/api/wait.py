"""Waiting for jobs: those with given ids, those of the shell that asks, or all that are unfinished, until they have
finished or nothing will start those that are left. A wait remembers its progress: each check costs only what has
finished since.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from msgspec.structs import replace

from gpuyard.daemon.api.codec import MOST_LISTED
from gpuyard.daemon.api.select_jobs import SelectionReader
from gpuyard.daemon.api.slow_requests import ThreadedReader
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.model.dependencies import MOST_NAMED, awaited
from gpuyard.model.job import SuspendedBy
from gpuyard.model.lifecycle import FINISHED, JobState
from gpuyard.model.selection import format_ids
from gpuyard.schema.queue import ReportedResult, StuckJob, UnsuccessfulJob, WaitResult
from gpuyard.schema.requests import ReportedWait, WaitQuery
from gpuyard.store.job_store import JobStore
from gpuyard.store.queue_queries import QueueQueries

_MAY_BE_STUCK = (JobState.HELD, JobState.BLOCKED, JobState.SUSPENDED)
_MOVING = sorted(set(JobState) - FINISHED - set(_MAY_BE_STUCK))


class StuckJobs:
    """Finds stuck jobs. `is_suspended_by_user` says whether only a user resumes a suspended job."""

    def __init__(self, queries: QueueQueries, store: JobStore, is_suspended_by_user: Callable[[int], bool]) -> None:
        self._queries, self._store, self._is_suspended_by_user = queries, store, is_suspended_by_user

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
        self._queries, self._store, self._ranges = queries, store, ranges
        self._left = list(ranges)
        self._stuck, self._chosen_by = stuck, chosen_by
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


_LONGEST_WAIT_S = 30.0
Ranges = list[tuple[int, int]]


class WaitHandler:
    def __init__(self, scheduler: SchedulerLoop, reader: ThreadedReader) -> None:
        self._scheduler = scheduler
        self._selection = SelectionReader(scheduler, reader)
        self._stuck = StuckJobs(scheduler.queries, scheduler.store, self._is_suspended_by_user)

    async def wait(self, query: WaitQuery) -> WaitResult:
        scheduler = self._scheduler
        ranges, chosen_by = await self._select(query)
        stuck = self._stuck if query.stuck else None
        waiting = JobWaits(scheduler.queries, scheduler.store, ranges, stuck, chosen_by)
        await scheduler.finish_signal.wait(waiting.is_over, min(_LONGEST_WAIT_S, query.timeout))
        answer = waiting.answer()
        return replace(answer, selection=self._selection.repeatable(query.ids, ranges, answer.selection))

    async def mark_reported(self, body: ReportedWait) -> ReportedResult:
        """Record that a wait of this shell has reported these jobs."""
        store = self._scheduler.store
        process = store.submitters.nearest(body.submitters)
        if process is None:
            return ReportedResult(known=False)
        ranges = await self._selection.find(body.ids) if body.ids else []
        now = self._scheduler.clock.now()
        await self._scheduler.checkpoints.may_write()
        with store.transaction():
            store.submitters.mark_reported(process, ranges, now, is_complete=body.own)
        return ReportedResult(known=True)

    async def _select(self, query: WaitQuery) -> tuple[Ranges, Literal["ids", "shell", "all"]]:
        """Return the jobs to wait for; without ids, those of the nearest process that has submitted any."""
        if query.ids:
            return await self._selection.ranges(query.ids), "ids"
        submitters = self._scheduler.store.submitters
        process = submitters.nearest(query.submitters.split())
        if process is not None:
            return submitters.unreported(process), "shell"
        return self._scheduler.queries.unfinished(), "all"

    def _is_suspended_by_user(self, job_id: int) -> bool:
        live = self._scheduler.controller.transitions.live.get(job_id)
        return live is not None and live.attempt.parked is SuspendedBy.BY_PERSON
