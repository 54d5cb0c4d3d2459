"""`GET /v1/summary`: what became of the jobs since last evening, or since another moment.

A thread reads the database over a connection of its own. One summary is made at a time, and cached for ten times its
CPU time, as reports are.
"""

import sqlite3
import time
from collections.abc import Callable
from datetime import UTC, datetime

from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.job.moments import last_moment, parse_moment
from gpuyard.core.job.selection import format_ids
from gpuyard.core.report.hourly import TimeWindow
from gpuyard.core.report.queue_summary import FinishedJobs, count_causes, count_jobs, default_since
from gpuyard.core.report.usage_report import GroupBy, ReportTotals
from gpuyard.daemon.api.slow_requests import ThreadedReader
from gpuyard.daemon.api.usage_report import AnswerCache, work_out
from gpuyard.daemon.api.wall_time import wall_time
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.errors import UserError
from gpuyard.schema.summary import QueueSummary, SummaryQuery
from gpuyard.store.finished_jobs import finished_since


class SummaryHandler:
    def __init__(self, scheduler: SchedulerLoop, reader: ThreadedReader, unbrought: Callable[[], list[str]]) -> None:
        self._scheduler = scheduler
        self._unbrought = unbrought
        self._reader = reader
        self._answers = AnswerCache[QueueSummary]()

    async def summary(self, query: SummaryQuery) -> QueueSummary:
        since = self._scheduler.clock.from_wall(self._since(query.since))
        return await self._answers.get(query.since, lambda: self._make(since))

    def _since(self, text: str) -> float:
        """Return the wall time at which the summary begins."""
        now = datetime.fromtimestamp(self._scheduler.clock.to_wall(self._scheduler.clock.now()), UTC).astimezone()
        local = now.replace(tzinfo=None)
        try:
            since = last_moment(parse_moment(text), local) if text.strip() else default_since(local)
            at = since.astimezone().timestamp()
        except (OverflowError, ValueError) as error:  # a date that this machine's clock cannot have
            raise UserError(f"'{text}' is out of range", hint="write it as 22:00, 2026-11-18 or 8h") from error
        if at > now.timestamp():
            raise UserError(f"'{text}' is in the future", hint="give a time that has passed, such as 22:00 or 8h")
        return at

    async def _make(self, since: float) -> tuple[QueueSummary, float]:
        clock, price = self._scheduler.clock, self._scheduler.controller.rules.energy_price
        window = TimeWindow(max(0.0, since), clock.now())

        def read(connection: sqlite3.Connection) -> tuple[FinishedJobs, ReportTotals, float]:
            began = time.thread_time()
            finished = finished_since(connection, window.since)
            report, _ = work_out(connection, window, GroupBy.USER, (), clock.to_wall, price=price)
            return finished, report.total, time.thread_time() - began

        finished, total, busy_s = await self._reader.read(read)
        answer = QueueSummary(
            since=wall_time(self._scheduler, window.since),
            until=wall_time(self._scheduler, window.until),
            host=self._scheduler.sampling.latest.snapshot.host.name,
            succeeded=finished.counts.get(JobState.SUCCEEDED, 0),
            failed=len(finished.failed),
            rejected=finished.counts.get(JobState.REJECTED, 0),
            cancelled=finished.counts.get(JobState.CANCELLED, 0),
            failed_ids=format_ids(job.id for job in finished.failed),
            causes=count_causes(finished.failed),
            now=count_jobs(self._scheduler.store.counts()),
            gpu_hours=total.gpu_hours,
            energy=total.energy,
            unbrought=self._unbrought(),
        )
        return answer, busy_s
