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
from typing import Any, TypeVar

from msgspec.structs import asdict, replace

from gpuyard.daemon.api.codec import copy_fields, encode, wall_time
from gpuyard.daemon.api.slow_requests import ThreadedReader
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.server.http_messages import Response
from gpuyard.errors import UserError
from gpuyard.model.lifecycle import JobState
from gpuyard.model.machine_snapshot import Device, Snapshot
from gpuyard.model.selection import LONGEST_S, format_ids, last_moment, parse_moment
from gpuyard.model.units import parse_duration
from gpuyard.report.chart_rows import TimelineSpan, TimeWindow, assign_rows, count_rows, suspensions
from gpuyard.report.failure_causes import count_causes, count_jobs, default_since
from gpuyard.report.usage_report import GroupBy, Reporter, UsageReport
from gpuyard.schema.machine import JobTimeline, LaneRow, QueueSummary, ReportAnswer, SummaryQuery, TimelineRun
from gpuyard.schema.requests import ReportQuery, TimelineQuery
from gpuyard.store.past_attempts import PastRun, attempts_since, finished_since, runs_between

_MAX_ENTRIES = 2000
_CPU = "CPU"
ToWall = Callable[[float], float]
T = TypeVar("T")


class Reports:
    def __init__(self, scheduler: SchedulerLoop, unbrought: Callable[[], list[str]]) -> None:
        self._scheduler, self._unbrought = scheduler, unbrought
        self._reader = ThreadedReader(scheduler.database.path)
        self._turn, self._busy_s = asyncio.Lock(), 0.0  # CPU time that the last query took
        self._kept: dict[object, tuple[Any, float]] = {}  # answers, and until when, by the monotonic clock

    def close(self) -> None:
        self._reader.close()

    async def report(self, query: ReportQuery) -> ReportAnswer:
        span_s = parse_duration(query.since)
        if not 60.0 <= span_s <= LONGEST_S:
            raise UserError(f"a report on {query.since} cannot be made", hint="give it from 1m to 3660d, such as 7d")
        return await self._cached((span_s, query.by), lambda: self._make_report(span_s, query.by))

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
        return await self._cached(text, lambda: self._make_summary(clock.from_wall(at)))

    async def _cached(self, key: object, make: Callable[[], Awaitable[T]]) -> T:
        """Return the answer of this key; one is made at a time."""
        async with self._turn:
            now = time.monotonic()
            self._kept = {each: kept for each, kept in self._kept.items() if kept[1] > now}
            if key not in self._kept:
                answer = await make()
                self._kept[key] = answer, time.monotonic() + 10.0 * self._busy_s
            kept: T = self._kept[key][0]
            return kept

    async def _read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        def run(past: sqlite3.Connection) -> T:
            began = time.thread_time()
            try:
                return query(past)
            finally:
                self._busy_s = time.thread_time() - began

        return await self._reader.read(run)

    async def _make_report(self, span_s: float, by: GroupBy) -> ReportAnswer:
        snapshot = (await self._scheduler.sampling.fresh(60.0)).snapshot
        now = self._scheduler.clock.now()
        window = TimeWindow(max(0.0, now - span_s), now)
        devices = snapshot.usable_devices()
        report = await self._read(lambda past: self._work_out(past, window, by, devices))
        uses = tuple(replace(use, label=snapshot.labels.get(use.id)) for use in report.devices)
        since, until = (wall_time(self._scheduler, at) for at in (window.since, window.until))
        totals = asdict(replace(report, devices=uses))
        return ReportAnswer(**totals, since=since, until=until, by=by, host=snapshot.host.name)

    def _work_out(
        self, past: sqlite3.Connection, window: TimeWindow, by: GroupBy, devices: Sequence[Device]
    ) -> UsageReport:
        price, to_wall = self._scheduler.controller.rules.energy_price, self._scheduler.clock.to_wall
        reporter = Reporter(window, devices, lambda at: datetime.fromtimestamp(to_wall(at), UTC).astimezone(), price)
        for ran in attempts_since(past, window.since, by):
            reporter.add(ran)
        return reporter.report()

    async def _make_summary(self, since: float) -> QueueSummary:
        window = TimeWindow(max(0.0, since), self._scheduler.clock.now())
        (counts, failed), total = await self._read(
            lambda past: (finished_since(past, window.since), self._work_out(past, window, GroupBy.USER, ()).total)
        )
        return QueueSummary(
            since=wall_time(self._scheduler, window.since),
            until=wall_time(self._scheduler, window.until),
            host=self._scheduler.sampling.latest.snapshot.host.name,
            succeeded=counts.get(JobState.SUCCEEDED, 0),
            failed=len(failed),
            rejected=counts.get(JobState.REJECTED, 0),
            cancelled=counts.get(JobState.CANCELLED, 0),
            failed_ids=format_ids(job_id for job_id, _ in failed),
            causes=count_causes(failed),
            now=count_jobs(self._scheduler.store.counts()),
            gpu_hours=total.gpu_hours,
            energy=total.energy,
            unbrought=self._unbrought(),
        )


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
        scheduler, running = self._scheduler, list[PastRun]()
        snapshot, to_wall = scheduler.sampling.latest.snapshot, scheduler.clock.to_wall
        for live in scheduler.controller.transitions.live.values():
            job, attempt = live.job, live.attempt
            if attempt.started is None or attempt.since >= until:
                continue
            was_suspended = attempt.suspended_at is not None or attempt.suspended_s
            events = scheduler.queries.events(job.id) if was_suspended else []
            run = PastRun(
                job=job.id, attempt=attempt.number, begins=attempt.since, ends=None, devices=attempt.devices,
                outcome=None, reserved_mb=attempt.reserved_mb, engine=attempt.engine, name=job.spec.name,
                user=job.user, command=" ".join(job.argv), moves=tuple((at, kind) for at, kind, _ in events),
                state=job.state,
            )  # fmt: skip
            running.append(run)

        def read(past: sqlite3.Connection) -> bytes:
            ended, left_out = runs_between(past, since, until, _MAX_ENTRIES)
            seen = {(run.job, run.attempt) for run in running}  # those of `ended` ended after `running` was read
            runs = [*running, *(run for run in ended if (run.job, run.attempt) not in seen)]
            return encode(_arrange(runs, snapshot, left_out, (since, until), to_wall))

        return Response(body=await self._reader.read(read))


def _arrange(
    runs: Sequence[PastRun], snapshot: Snapshot, left_out: int, window: tuple[float, float], to_wall: ToWall
) -> JobTimeline:
    """Return a run in each of its lanes (its engine elsewhere, its devices, or the CPU), without the oldest above the
    limit."""
    cpu = LaneRow(device=None, label=_CPU, name=None, rows=1)
    entries = list[tuple[LaneRow, PastRun]]()
    for run in runs:
        devices = [_device_lane(device_id, snapshot) for device_id in run.devices]
        entries += [(lane, run) for lane in ([replace(cpu, label=run.engine)] if run.engine else devices or [cpu])]
    entries.sort(key=lambda entry: (entry[1].ends is None, entry[1].ends or entry[1].begins), reverse=True)
    left_out += max(0, len(entries) - _MAX_ENTRIES)
    del entries[_MAX_ENTRIES:]
    # All usable devices, with or without entries, then other devices of entries, the CPU, cluster engines.
    usable = [_device_lane(device.id, snapshot) for device in snapshot.usable_devices()]
    others = {lane for lane, _ in entries} - set(usable)
    lanes = usable + sorted(others, key=lambda lane: (lane.device is None, lane.label != _CPU, lane.label))
    places = {lane: place for place, lane in enumerate(lanes)}
    spans = [TimelineSpan(lane=places[lane], start=run.begins, end=run.ends) for lane, run in entries]
    rows = assign_rows(spans)
    counted = count_rows(spans, rows)
    stretches = [
        copy_fields(
            TimelineRun,
            run,
            command=run.command if len(run.command) <= 300 else f"{run.command[:300]}…",
            lane=span.lane,
            row=row,
            since=to_wall(run.begins),
            until=None if run.ends is None else to_wall(run.ends),
            suspended=[
                (to_wall(begin), None if end is None else to_wall(end))
                for begin, end in suspensions(run.moves, run.begins, run.ends)
            ],
        )
        for (_, run), span, row in zip(entries, spans, rows, strict=True)
    ]
    return JobTimeline(
        since=to_wall(window[0]),
        until=to_wall(window[1]),
        lanes=[replace(lane, rows=counted.get(place, 1)) for place, lane in enumerate(lanes)],
        stretches=stretches,
        left_out=left_out,
    )


def _device_lane(device_id: str, snapshot: Snapshot) -> LaneRow:
    device, label = snapshot.device(device_id), snapshot.labels.get(device_id)
    name = None if device is None else device.name
    return LaneRow(device=device_id, label=device_id if label is None else f"GPU {label}", name=name, rows=1)
