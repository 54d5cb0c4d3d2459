"""`GET /v1/report`, totals of all attempts in a period, and `GET /v1/summary`, what became of the jobs of a night.

A thread reads the database over a connection of its own: the loop keeps running. Answers are cached for ten times
their CPU time, so that a viewer who polls them costs at most a tenth of a core.
"""

import asyncio
import sqlite3
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Generic, TypeVar

from msgspec.structs import asdict, replace

from gpuyard.daemon.api.codec import wall_time
from gpuyard.daemon.api.slow_requests import ThreadedReader
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.errors import UserError
from gpuyard.model.energy import NO_PRICE, EnergyPrice
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

_DEVICES_SEEN_WITHIN_S = 60.0
_CACHE_FACTOR = 10.0


T = TypeVar("T")


class AnswerCache(Generic[T]):
    """Makes one answer at a time, and keeps it for ten times the CPU time that it took."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._kept: dict[object, tuple[T, float]] = {}  # until when, by the monotonic clock

    async def get(self, key: object, make: Callable[[], Awaitable[tuple[T, float]]]) -> T:
        """Return the answer of this key. `make` returns it with the seconds of CPU time that it took."""
        async with self._turn:
            now = time.monotonic()
            self._kept = {each: kept for each, kept in self._kept.items() if kept[1] > now}
            if key not in self._kept:
                answer, busy_s = await make()
                self._kept[key] = answer, time.monotonic() + busy_s * _CACHE_FACTOR
            return self._kept[key][0]


class ReportHandler:
    def __init__(self, scheduler: SchedulerLoop) -> None:
        self._scheduler = scheduler
        self._reader = ThreadedReader(scheduler.database.path)  # its own: a search need not wait for a report
        self._answers = AnswerCache[ReportAnswer]()

    def close(self) -> None:
        self._reader.close()

    async def report(self, query: ReportQuery) -> ReportAnswer:
        span_s = parse_duration(query.since)
        if not 60.0 <= span_s <= LONGEST_S:
            raise UserError(f"a report on {query.since} cannot be made", hint="give it from 1m to 3660d, such as 7d")
        return await self._answers.get((span_s, query.by), lambda: self._make(span_s, query.by))

    async def _make(self, span_s: float, by: GroupBy) -> tuple[ReportAnswer, float]:
        snapshot = (await self._scheduler.sampling.fresh(_DEVICES_SEEN_WITHIN_S)).snapshot
        clock = self._scheduler.clock
        now = clock.now()
        window = TimeWindow(max(0.0, now - span_s), now)
        devices, to_wall = snapshot.usable_devices(), clock.to_wall
        price = self._scheduler.controller.rules.energy_price
        report, busy_s = await self._reader.read(
            lambda connection: work_out(connection, window, by, devices, to_wall, price=price)
        )
        uses = tuple(replace(use, label=snapshot.labels.get(use.id)) for use in report.devices)
        report = replace(report, devices=uses)
        since, until = (wall_time(self._scheduler, at) for at in (window.since, window.until))
        return ReportAnswer(**asdict(report), since=since, until=until, by=by, host=snapshot.host.name), busy_s


def work_out(  # noqa: PLR0913 - all that a report is made of
    connection: sqlite3.Connection,
    window: TimeWindow,
    by: GroupBy,
    devices: Sequence[Device],
    to_wall: Callable[[float], float],
    *,
    price: EnergyPrice = NO_PRICE,
) -> tuple[UsageReport, float]:
    """Return the report, and the seconds of CPU time that it took."""
    began = time.thread_time()
    reporter = Reporter(window, devices, lambda at: datetime.fromtimestamp(to_wall(at), UTC).astimezone(), price)
    for ran in attempts_since(connection, window.since, by):
        reporter.add(ran)
    return reporter.report(), time.thread_time() - began


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
