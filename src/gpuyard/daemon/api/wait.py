"""Waiting for jobs: those with given ids, those of the shell that asks, or all that are unfinished, until they have
finished or nothing will start those that are left. A wait remembers its progress: each check costs only what has
finished since.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Literal

from msgspec.structs import replace

from gpuyard.daemon.api.codec import MOST_LISTED
from gpuyard.daemon.api.jobs import SelectionReader
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
_UNSUCCESSFUL = sorted(FINISHED - {JobState.SUCCEEDED})
Ranges = list[tuple[int, int]]


class JobWaits:
    """A wait until all jobs in `ranges` have finished; with `is_suspended_by_user`, or until only jobs are left that
    nothing will start. `chosen_by` says how the jobs were selected."""

    def __init__(
        self,
        queries: QueueQueries,
        store: JobStore,
        ranges: Ranges,
        is_suspended_by_user: Callable[[int], bool] | None = None,
        chosen_by: Literal["ids", "shell", "all"] = "ids",
    ) -> None:
        self._queries, self._store, self._ranges, self._left = queries, store, ranges, list(ranges)
        self._is_suspended_by_user, self._chosen_by = is_suspended_by_user, chosen_by
        self._are_stuck = False

    def is_over(self) -> bool:
        while self._left:
            first, last = self._left[0]
            unfinished = self._queries.first_unfinished(first, last)
            if unfinished is not None:
                self._left[0] = (unfinished, last)
                break
            del self._left[0]
        self._are_stuck = bool(self._left) and self._is_suspended_by_user is not None and self._are_all_stuck()
        return self._are_stuck or not self._left

    def _are_all_stuck(self) -> bool:
        """Return whether all jobs that are left are stuck."""
        if any(self._queries.has_any(first, last, _MOVING) for first, last in self._left):
            return False
        known: dict[int, bool] = {}
        found = (self._is_stuck(job_id, state, known) for job_id, state in self._candidates())
        return next(found, False) and all(found)

    def _candidates(self) -> Iterator[tuple[int, JobState]]:
        for first, last in self._left:
            for job_id in self._queries.ids(first, last, _MAY_BE_STUCK):
                state = self._store.states_of([job_id]).get(job_id)
                if state is not None:
                    yield job_id, state

    def _is_stuck(self, job_id: int, state: JobState, known: dict[int, bool]) -> bool:
        """Return whether a job is stuck; `known` keeps the answers. Job ids grow along dependencies, so this ends."""
        if job_id not in known:
            if state is JobState.BLOCKED:
                others = awaited(self._store.dependencies(job_id))
                known[job_id] = bool(others) and all(self._is_stuck(other, its, known) for other, _, its in others)
            else:
                is_theirs = self._is_suspended_by_user or (lambda _: False)
                known[job_id] = state is JobState.HELD or (state is JobState.SUSPENDED and is_theirs(job_id))
        return known[job_id]

    def answer(self) -> WaitResult:
        """Return the result so far. Results are counted only when all jobs have finished, because that takes time."""
        selection = " ".join(f"{first}-{last}" if first != last else str(first) for first, last in self._ranges)
        if self._left and not self._are_stuck:
            # Of a great many jobs, the counts of the whole queue stand for theirs.
            is_few = sum(last - first + 1 for first, last in self._left) <= 20_000
            counted = [self._queries.counts_in(*each) for each in self._left] if is_few else [self._store.counts()]
            left = sum(count for each in counted for state, count in each.items() if state not in FINISHED)
            running = sum(each.get(JobState.RUNNING, 0) for each in counted)
            return WaitResult(done=False, left=left, running=running, selection=selection, chosen_by=self._chosen_by)
        failed_count = sum(self._queries.count_in(self._ranges, state) for state in _UNSUCCESSFUL)
        stuck, stuck_count = list[StuckJob](), 0
        if self._are_stuck:
            stuck_count = sum(self._queries.count_in(self._left, state) for state in _MAY_BE_STUCK)
            for job_id, state in islice(self._candidates(), MOST_LISTED):
                stuck.append(StuckJob(id=job_id, state=state, reason=self._what_starts(job_id, state)))
        return WaitResult(
            done=not self._are_stuck,
            left=stuck_count,
            running=0,
            selection=selection,
            succeeded=self._queries.count_in(self._ranges, JobState.SUCCEEDED),
            failed=list(islice(self._unsuccessful(), MOST_LISTED)) if failed_count else [],
            failed_count=failed_count,
            chosen_by=self._chosen_by,
            is_stuck=self._are_stuck,
            stuck=stuck,
            stuck_count=stuck_count,
        )

    def _what_starts(self, job_id: int, state: JobState) -> str:
        if state is JobState.HELD:
            return f"`gpuyard release {job_id}` lets it start"
        if state is JobState.SUSPENDED:
            return f"`gpuyard resume {job_id}` continues it"
        others = [other for other, _, _ in awaited(self._store.dependencies(job_id))]
        return f"it waits for {format_ids(others[:MOST_NAMED])}"

    def _unsuccessful(self) -> Iterator[UnsuccessfulJob]:
        for first, last in self._ranges:
            for job_id in self._queries.ids(first, last, _UNSUCCESSFUL):
                if (job := self._store.job(job_id)) is not None:
                    outcome = job.outcome.kind if job.outcome is not None else None
                    yield UnsuccessfulJob(id=job_id, state=job.state, outcome=outcome, reason=job.reason)


class WaitHandler:
    def __init__(self, scheduler: SchedulerLoop, reader: ThreadedReader) -> None:
        self._scheduler, self._selection = scheduler, SelectionReader(scheduler, reader)

    async def wait(self, query: WaitQuery) -> WaitResult:
        """Wait for the jobs with these ids; without ids, for those of the nearest process that has submitted any."""
        scheduler = self._scheduler
        process = None if query.ids else scheduler.store.submitters.nearest(query.submitters.split())
        chosen_by: Literal["ids", "shell", "all"] = "ids" if query.ids else "all" if process is None else "shell"
        if process is not None:
            ranges = scheduler.store.submitters.unreported(process)
        else:
            ranges = await self._selection.ranges(query.ids) if query.ids else scheduler.queries.unfinished()
        is_theirs = self._is_suspended_by_user if query.stuck else None
        waiting = JobWaits(scheduler.queries, scheduler.store, ranges, is_theirs, chosen_by)
        await scheduler.finish_signal.wait(waiting.is_over, min(30.0, query.timeout))
        answer = waiting.answer()
        return replace(answer, selection=self._selection.repeatable(query.ids, ranges, answer.selection))

    async def mark_reported(self, body: ReportedWait) -> ReportedResult:
        """Record that a wait of this shell has reported these jobs."""
        store = self._scheduler.store
        process = store.submitters.nearest(body.submitters)
        if process is None:
            return ReportedResult(known=False)
        ranges = await self._selection.find(body.ids) if body.ids else []
        await self._scheduler.checkpoints.may_write()
        with store.transaction():
            now = self._scheduler.clock.now()
            store.submitters.mark_reported(process, ranges, now, is_complete=body.own)
        return ReportedResult(known=True)

    def _is_suspended_by_user(self, job_id: int) -> bool:
        live = self._scheduler.controller.transitions.live.get(job_id)
        return live is not None and live.attempt.parked is SuspendedBy.BY_PERSON
