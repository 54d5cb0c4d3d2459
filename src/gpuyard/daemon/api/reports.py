"""`GET /v1/report`, totals of all attempts in a period, and `GET /v1/summary`, what became of the jobs of a night.

A thread reads the database over a connection of its own: the loop keeps running, and a search need not wait for a
report. Answers are cached for ten times their CPU time: a viewer who polls them costs at most a tenth of a core.
"""

import asyncio
import sqlite3
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec.structs import asdict, replace

from gpuyard.daemon.api.codec import wall_time
from gpuyard.daemon.api.slow_requests import ThreadedReader
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.errors import UserError
from gpuyard.model.lifecycle import JobState
from gpuyard.model.machine_snapshot import Device
from gpuyard.model.selection import LONGEST_S, format_ids, last_moment, parse_moment
from gpuyard.model.units import parse_duration
from gpuyard.report.chart_rows import TimeWindow
from gpuyard.report.failure_causes import FinishedJobs, count_causes, count_jobs, default_since
from gpuyard.report.usage_report import GroupBy, Reporter, ReportTotals, UsageReport
from gpuyard.schema.machine import QueueSummary, ReportAnswer, SummaryQuery
from gpuyard.schema.requests import ReportQuery
from gpuyard.store.past_attempts import attempts_since, finished_since


class Reports:
    def __init__(self, scheduler: SchedulerLoop, unbrought: Callable[[], list[str]]) -> None:
        self._scheduler, self._unbrought = scheduler, unbrought
        self._reader = ThreadedReader(scheduler.database.path)
        self._turn = asyncio.Lock()
        self._kept: dict[object, tuple[Any, float]] = {}  # answers, and until when, by the monotonic clock

    def close(self) -> None:
        self._reader.close()

    async def report(self, query: ReportQuery) -> ReportAnswer:
        span_s = parse_duration(query.since)
        if not 60.0 <= span_s <= LONGEST_S:
            raise UserError(f"a report on {query.since} cannot be made", hint="give it from 1m to 3660d, such as 7d")
        answer: ReportAnswer = await self._cached((span_s, query.by), lambda: self._make_report(span_s, query.by))
        return answer

    async def summary(self, query: SummaryQuery) -> QueueSummary:
        clock, text = self._scheduler.clock, query.since
        now = datetime.fromtimestamp(clock.to_wall(clock.now()), UTC).astimezone()
        local = now.replace(tzinfo=None)
        try:
            since = last_moment(parse_moment(text), local) if text.strip() else default_since(local)
            at = since.astimezone().timestamp()
        except (OverflowError, ValueError) as error:  # a date that this machine's clock cannot have
            raise UserError(f"'{text}' is out of range", hint="write it as 22:00, 2026-11-18 or 8h") from error
        if at > now.timestamp():
            raise UserError(f"'{text}' is in the future", hint="give a time that has passed, such as 22:00 or 8h")
        answer: QueueSummary = await self._cached(text, lambda: self._make_summary(clock.from_wall(at)))
        return answer

    async def _cached(self, key: object, make: Callable[[], Awaitable[tuple[Any, float]]]) -> Any:
        """Return the answer of this key; one is made at a time. `make` returns it with the CPU seconds it took."""
        async with self._turn:
            now = time.monotonic()
            self._kept = {each: kept for each, kept in self._kept.items() if kept[1] > now}
            if key not in self._kept:
                answer, busy_s = await make()
                self._kept[key] = answer, time.monotonic() + 10.0 * busy_s
            return self._kept[key][0]

    async def _make_report(self, span_s: float, by: GroupBy) -> tuple[ReportAnswer, float]:
        snapshot = (await self._scheduler.sampling.fresh(60.0)).snapshot
        now = self._scheduler.clock.now()
        window = TimeWindow(max(0.0, now - span_s), now)
        devices = snapshot.usable_devices()
        report, busy_s = await self._reader.read(lambda past: self._work_out(past, window, by, devices))
        uses = tuple(replace(use, label=snapshot.labels.get(use.id)) for use in report.devices)
        since, until = (wall_time(self._scheduler, at) for at in (window.since, window.until))
        totals = asdict(replace(report, devices=uses))
        return ReportAnswer(**totals, since=since, until=until, by=by, host=snapshot.host.name), busy_s

    def _work_out(
        self, past: sqlite3.Connection, window: TimeWindow, by: GroupBy, devices: Sequence[Device]
    ) -> tuple[UsageReport, float]:
        """Return the report, and the seconds of CPU time that it took."""
        began, to_wall = time.thread_time(), self._scheduler.clock.to_wall
        price = self._scheduler.controller.rules.energy_price
        reporter = Reporter(window, devices, lambda at: datetime.fromtimestamp(to_wall(at), UTC).astimezone(), price)
        for ran in attempts_since(past, window.since, by):
            reporter.add(ran)
        return reporter.report(), time.thread_time() - began

    async def _make_summary(self, since: float) -> tuple[QueueSummary, float]:
        window = TimeWindow(max(0.0, since), self._scheduler.clock.now())

        def read(past: sqlite3.Connection) -> tuple[FinishedJobs, ReportTotals, float]:
            began = time.thread_time()
            finished = finished_since(past, window.since)
            report, _ = self._work_out(past, window, GroupBy.USER, ())
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
