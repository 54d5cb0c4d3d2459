"""`GET /v1/report`: totals of all attempts in a period.

Rules:
- A thread reads the database over a connection of its own: the loop keeps running.
- One report is made at a time, and cached for ten times its CPU time, so that a viewer who polls it costs at most a
  tenth of a core.
"""

import asyncio
import sqlite3
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Generic, TypeVar

from msgspec.structs import asdict, replace

from gpuyard.core.job.moments import LONGEST_S
from gpuyard.core.report.energy import NO_PRICE, EnergyPrice
from gpuyard.core.report.hourly import TimeWindow
from gpuyard.core.report.usage_report import GroupBy, Reporter, UsageReport
from gpuyard.core.snapshot import Device
from gpuyard.core.units import parse_duration
from gpuyard.daemon.api.slow_requests import ThreadedReader
from gpuyard.daemon.api.wall_time import wall_time
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.errors import UserError
from gpuyard.schema.machine import ReportAnswer
from gpuyard.schema.requests import ReportQuery
from gpuyard.store.past_attempts import attempts_since

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
