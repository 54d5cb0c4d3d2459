"""`GET /v1/report`: what the attempts of a stretch of time came to.

Rules:
- The database is read in a thread, over a connection of its own: the loop goes on meanwhile.
- One is worked out at a time, and given again for ten times as long as a core was busy with it, so that whoever watches
  it costs a tenth of a core at most. That is a moment, but for a report on very many attempts.
"""

import asyncio
import sqlite3
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import Struct

from gpuyard.core.report.hourly import TimeWindow
from gpuyard.core.report.usage_report import Reporter, UsageReport
from gpuyard.core.snapshot import Device
from gpuyard.core.snapshot_json import iso_time
from gpuyard.core.units import parse_duration
from gpuyard.daemon.api.read_in_thread import ThreadedReader
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.server.http_parser import Request
from gpuyard.daemon.server.router import Answer, Routes
from gpuyard.errors import UserError
from gpuyard.store.report_queries import GroupBy, attempts_since

DEFAULT_SINCE = "7d"
_LONGEST_S = 3660 * 86_400.0
_DEVICES_SEEN_WITHIN_S = 60.0
_GIVEN_AGAIN = 10.0


class _ReportRequest(Struct, frozen=True):
    span_s: float
    by: GroupBy


class _Given(Struct, frozen=True):
    answer: Answer
    until: float  # by the clock that only goes forward


class ReportHandler:
    def __init__(self, scheduler: SchedulerLoop) -> None:
        self._scheduler = scheduler
        self._reader = ThreadedReader(scheduler.database.path)  # its own: whoever searches need not wait for a report
        self._turn = asyncio.Lock()
        self._given: dict[_ReportRequest, _Given] = {}

    def routes(self) -> Routes:
        return {("GET", "/report"): self._report}

    def close(self) -> None:
        self._reader.close()

    async def _report(self, request: Request) -> Answer:
        asked = _ReportRequest(
            _read_span(request.query.get("since") or DEFAULT_SINCE), _read_by(request.query.get("by"))
        )
        async with self._turn:
            now = time.monotonic()
            self._given = {each: given for each, given in self._given.items() if given.until > now}
            if asked not in self._given:
                answer, busy_s = await self._work_out(asked)
                self._given[asked] = _Given(answer, time.monotonic() + busy_s * _GIVEN_AGAIN)
            return self._given[asked].answer

    async def _work_out(self, asked: _ReportRequest) -> tuple[Answer, float]:
        snapshot = (await self._scheduler.sampling.fresh(_DEVICES_SEEN_WITHIN_S)).snapshot
        until = self._scheduler.sampling.now()
        window = TimeWindow(max(0.0, until - asked.span_s), until)
        devices = snapshot.usable_devices()
        report, busy_s = await self._reader.read(lambda connection: work_out(connection, window, asked.by, devices))
        answer = {
            "since": iso_time(window.since),
            "until": iso_time(window.until),
            "by": str(asked.by),
            "host": snapshot.host.name,
            **_shape(report),
        }
        return answer, busy_s


def work_out(
    connection: sqlite3.Connection, window: TimeWindow, by: GroupBy, devices: Sequence[Device]
) -> tuple[UsageReport, float]:
    """The report, and how many seconds of a core it has cost."""
    began = time.thread_time()
    reporter = Reporter(window, devices, _local)
    for ran in attempts_since(connection, window.since, by):
        reporter.add(ran)
    return reporter.report(), time.thread_time() - began


def _local(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC).astimezone()


def _shape(report: UsageReport) -> dict[str, Any]:
    """As JSON has it: the totals of a group stand beside its name."""
    shape: dict[str, Any] = msgspec.to_builtins(report)
    shape["groups"] = [{**group, **totals} for group in shape["groups"] if (totals := group.pop("totals"))]
    return shape


def _read_span(text: str) -> float:
    span_s = parse_duration(text)
    if not 60.0 <= span_s <= _LONGEST_S:
        raise UserError(f"a report on {text} cannot be made", hint="give it from 1m to 3660d, such as 7d")
    return span_s


def _read_by(text: str | None) -> GroupBy:
    try:
        return GroupBy(text or GroupBy.USER)
    except ValueError:
        raise UserError(f"there is no report by '{text}'", hint=f"it can be by {', '.join(GroupBy)}") from None
