"""Routes that wait for jobs: those with given ids, those of the shell that asks, or all that are unfinished."""

from typing import Literal

from msgspec.structs import replace

from gpuyard.core.job.job import SuspendedBy
from gpuyard.daemon.api.select_jobs import SelectionReader
from gpuyard.daemon.api.slow_requests import ThreadedReader
from gpuyard.daemon.api.stuck_jobs import StuckJobs
from gpuyard.daemon.api.wait_for_jobs import JobWaits
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.schema.queue import ReportedResult, WaitResult
from gpuyard.schema.requests import ReportedWait, WaitQuery

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
