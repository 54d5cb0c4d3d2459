"""`GET /v1/report`, totals of all attempts in a period; `GET /v1/summary`, what became of the jobs of a night; and
`GET /v1/timeline`, which job ran on which device and when, with one lane per device.

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

from gpuyard.daemon.api.codec import copy_fields, encode, wall_time
from gpuyard.daemon.api.slow_requests import ThreadedReader
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.server.http_messages import Response
from gpuyard.errors import UserError
from gpuyard.model.job import Attempt
from gpuyard.model.lifecycle import JobState
from gpuyard.model.machine_snapshot import Device, Snapshot
from gpuyard.model.selection import LONGEST_S, format_ids, last_moment, parse_moment
from gpuyard.model.units import parse_duration
from gpuyard.report.chart_rows import TimelineSpan, TimeWindow, assign_rows, count_rows, suspensions
from gpuyard.report.failure_causes import FinishedJobs, count_causes, count_jobs, default_since
from gpuyard.report.usage_report import GroupBy, Reporter, ReportTotals, UsageReport
from gpuyard.schema.machine import JobTimeline, LaneRow, QueueSummary, ReportAnswer, SummaryQuery, TimelineRun
from gpuyard.schema.requests import ReportQuery, TimelineQuery
from gpuyard.store.past_attempts import PastRun, attempts_since, finished_since, runs_between

_MAX_ENTRIES = 2000
_CPU = "CPU"
# One attempt in one lane; the numbers of its lane and row are filled in at the end.
TimelineEntry = tuple[LaneRow, TimelineRun]
ToWall = Callable[[float], float]


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


class Timeline:
    def __init__(self, scheduler: SchedulerLoop, reader: ThreadedReader) -> None:
        self._scheduler, self._reader = scheduler, reader
        # By span and by how the wall clock was set: when it was computed, and the response.
        self._cached: dict[tuple[float, int], tuple[float, Response]] = {}

    async def timeline(self, query: TimelineQuery) -> Response:
        span_s = parse_duration(query.span)
        if not 0 < span_s <= LONGEST_S:
            raise UserError("span has to be over 0 and at most 3660 days", hint="such as 10m, 1h or 7d")
        clock = self._scheduler.clock
        if query.until is not None:
            until = clock.from_wall(query.until)
            return await self._between(until - span_s, until)
        # A timeline is drawn at most 1200 points wide: a newer one would look the same until a 1200th of its span has
        # passed. Each cached response may have a megabyte.
        now, max_age_s = clock.now(), min(60.0, span_s / 1200.0)
        recent = [(each, cached) for each, cached in self._cached.items() if now - 60.0 < cached[0]]
        self._cached = dict(recent[-16:])
        key = span_s, round(clock.to_wall(now) - now)
        if key not in self._cached or now - self._cached[key][0] > max_age_s:
            self._cached[key] = now, await self._between(now - span_s, now)
        return self._cached[key][1]

    async def _between(self, since: float, until: float) -> Response:
        scheduler, running = self._scheduler, list[TimelineEntry]()
        snapshot, to_wall = scheduler.sampling.latest.snapshot, scheduler.clock.to_wall
        for live in scheduler.controller.transitions.live.values():
            job, attempt = live.job, live.attempt
            if attempt.started is None:
                continue
            was_suspended = attempt.suspended_at is not None or attempt.suspended_s
            events = scheduler.queries.events(job.id) if was_suspended else []
            row = TimelineRun(
                job=job.id,
                attempt=attempt.number,
                name=job.spec.name,
                command=_shorten(" ".join(job.argv)),
                user=job.user,
                since=attempt.since,
                until=None,
                state=str(job.state),
                outcome=None,
                suspended=suspensions([(at, kind) for at, kind, _ in events], attempt.since, None),
                reserved_mb=attempt.reserved_mb,
            )
            running += _entries(row, attempt, snapshot)
        body = await self._reader.read(lambda past: _render(past, running, snapshot, (since, until), to_wall))
        return Response(body=body)


def _render(
    past: sqlite3.Connection,
    running: list[TimelineEntry],
    snapshot: Snapshot,
    window: tuple[float, float],
    to_wall: ToWall,
) -> bytes:
    since, until = window
    runs, left_out = runs_between(past, since, until, _MAX_ENTRIES)
    seen = {(row.job, row.attempt) for _, row in running}
    entries = [(lane, row) for lane, row in running if row.since < until]
    for run in runs:
        if (run.job, run.attempt) in seen:  # it ended after `running` was read
            continue
        row = copy_fields(
            run,
            TimelineRun,
            command=_shorten(run.command),
            lane=0,
            row=0,
            since=run.begins,
            until=run.ends,
            state="ended",
            suspended=suspensions(run.moves, run.begins, run.ends),
        )
        entries += _entries(row, run, snapshot)
    timeline = _arrange(entries, snapshot, left_out, since, until)
    stretches = [
        replace(
            each,
            since=to_wall(each.since),
            until=None if each.until is None else to_wall(each.until),
            suspended=[(to_wall(begin), None if end is None else to_wall(end)) for begin, end in each.suspended],
        )
        for each in timeline.stretches
    ]
    return encode(replace(timeline, since=to_wall(since), until=to_wall(until), stretches=stretches))


def _entries(row: TimelineRun, attempt: Attempt | PastRun, snapshot: Snapshot) -> list[TimelineEntry]:
    """Return an entry in each lane of the attempt: its engine elsewhere, or its devices, or the CPU."""
    if attempt.engine:
        return [(LaneRow(device=None, label=attempt.engine, name=None, rows=1), row)]
    lanes = [_device_lane(device_id, snapshot) for device_id in attempt.devices]
    return [(lane, row) for lane in lanes or [LaneRow(device=None, label=_CPU, name=None, rows=1)]]


def _arrange(
    entries: list[TimelineEntry], snapshot: Snapshot, left_out: int, since: float, until: float
) -> JobTimeline:
    """Number the lanes and the rows, and leave out the oldest entries above the limit."""
    entries.sort(key=lambda entry: (entry[1].until is None, entry[1].until or entry[1].since), reverse=True)
    left_out += max(0, len(entries) - _MAX_ENTRIES)
    del entries[_MAX_ENTRIES:]
    # All usable devices, with or without entries, then other devices of entries, the CPU, cluster engines.
    usable = [_device_lane(device.id, snapshot) for device in snapshot.usable_devices()]
    others = {lane for lane, _ in entries} - set(usable)
    lanes = usable + sorted(others, key=lambda lane: (lane.device is None, lane.label != _CPU, lane.label))
    places = {lane: place for place, lane in enumerate(lanes)}
    spans = [TimelineSpan(lane=places[lane], start=run.since, end=run.until) for lane, run in entries]
    rows = assign_rows(spans)
    counted = count_rows(spans, rows)
    return JobTimeline(
        since=since,
        until=until,
        lanes=[replace(lane, rows=counted.get(place, 1)) for place, lane in enumerate(lanes)],
        stretches=[
            replace(run, lane=span.lane, row=row) for (_, run), span, row in zip(entries, spans, rows, strict=True)
        ],
        left_out=left_out,
    )


def _device_lane(device_id: str, snapshot: Snapshot) -> LaneRow:
    device, label = snapshot.device(device_id), snapshot.labels.get(device_id)
    name = None if device is None else device.name
    return LaneRow(device=device_id, label=device_id if label is None else f"GPU {label}", name=name, rows=1)


def _shorten(command: str) -> str:
    return command if len(command) <= 300 else f"{command[:300]}…"
