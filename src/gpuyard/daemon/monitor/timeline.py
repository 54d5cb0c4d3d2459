"""The route `/timeline`: which job ran on which device and when, with one lane per device."""

import sqlite3
import time
from collections.abc import Iterable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.core.job.job import Attempt, Job
from gpuyard.core.report.timeline_rows import TimelineSpan, assign_rows, count_rows, suspensions
from gpuyard.core.snapshot import Snapshot
from gpuyard.core.units import parse_duration
from gpuyard.daemon.api.codec import encode
from gpuyard.daemon.api.slow_requests import ThreadedReader
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.server.http_parser import Response
from gpuyard.errors import UserError
from gpuyard.schema.machine import JobTimeline, LaneRow, TimelineRun
from gpuyard.schema.requests import TimelineQuery
from gpuyard.store.past_attempts import PastRun, runs_between

_MAX_ENTRIES = 2000
_MAX_SPAN_S = 366 * 86_400.0
_MAX_COMMAND = 300
_CPU = "CPU"
# A timeline is drawn at most 1200 points wide, so it is computed again after a 1200th of its span, at most 60 s.
_POINTS, _MAX_AGE_S = 1200.0, 60.0
# Each cached response may have a megabyte.
_MAX_CACHED = 16


class TimelineLane(Struct, frozen=True, kw_only=True):
    """A device, the CPU, or a cluster engine."""

    device: str | None
    label: str
    name: str | None = None


class TimelineEntry(Struct, frozen=True, kw_only=True):
    """One attempt in one lane; the numbers of its lane and row are filled in at the end."""

    lane: TimelineLane
    run: TimelineRun


class RunningAttempt(Struct, frozen=True, kw_only=True):
    """A live attempt, and when its job was suspended and resumed (`moves`)."""

    job: Job
    attempt: Attempt
    moves: tuple[tuple[float, str], ...]


class Timeline:
    def __init__(self, scheduler: SchedulerLoop, reader: ThreadedReader) -> None:
        self._scheduler = scheduler
        self._reader = reader
        self._cached: dict[float, tuple[float, Response]] = {}  # by span: when it was computed, and the response

    async def timeline(self, query: TimelineQuery) -> Response:
        span_s = parse_duration(query.span)
        if not 0 < span_s <= _MAX_SPAN_S:
            raise UserError("span has to be over 0 and at most 366 days", hint="such as 10m, 1h or 7d")
        if query.until is not None:
            return await self._between(query.until - span_s, query.until)
        return await self._until_now(span_s)

    async def _until_now(self, span_s: float) -> Response:
        """Return the cached response while a newer one would look the same."""
        now, max_age_s = time.time(), min(_MAX_AGE_S, span_s / _POINTS)
        recent = [(each, cached) for each, cached in self._cached.items() if now - _MAX_AGE_S < cached[0] <= now]
        self._cached = dict(recent[-_MAX_CACHED:])
        if span_s not in self._cached or now - self._cached[span_s][0] > max_age_s:
            self._cached[span_s] = now, await self._between(now - span_s, now)
        return self._cached[span_s][1]

    async def _between(self, since: float, until: float) -> Response:
        snapshot, running = self._scheduler.sampling.latest.snapshot, list(self._running())
        body = await self._reader.read(lambda past: _render(past, running, snapshot, since, until))
        return Response(body=body)

    def _running(self) -> Iterator[RunningAttempt]:
        for live in self._scheduler.controller.transitions.live.values():
            if live.attempt.started is not None:
                yield RunningAttempt(job=live.job, attempt=live.attempt, moves=self._moves(live.attempt))

    def _moves(self, attempt: Attempt) -> tuple[tuple[float, str], ...]:
        if attempt.suspended_at is None and not attempt.suspended_s:
            return ()
        return tuple((at, kind) for at, kind, _ in self._scheduler.queries.events(attempt.job_id))


def _render(
    past: sqlite3.Connection, running: list[RunningAttempt], snapshot: Snapshot, since: float, until: float
) -> bytes:
    runs, left_out = runs_between(past, since, until, _MAX_ENTRIES)
    seen = {(each.job.id, each.attempt.number) for each in running}
    entries = [entry for each in running if each.attempt.since < until for entry in _running_entries(each, snapshot)]
    for run in runs:
        if (run.job, run.attempt) not in seen:  # else it ended after `running` was read
            entries += _past_entries(run, snapshot)
    return encode(_arrange(entries, snapshot, left_out, since, until))


def _running_entries(running: RunningAttempt, snapshot: Snapshot) -> Iterator[TimelineEntry]:
    job, attempt = running.job, running.attempt
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
        suspended=suspensions(running.moves, attempt.since, None),
        reserved_mb=attempt.reserved_mb,
    )
    for lane in _lanes(attempt.devices, attempt.engine, snapshot):
        yield TimelineEntry(lane=lane, run=row)


def _past_entries(run: PastRun, snapshot: Snapshot) -> Iterator[TimelineEntry]:
    row = TimelineRun(
        job=run.job,
        attempt=run.attempt,
        name=run.name,
        command=_shorten(run.command),
        user=run.user,
        since=run.begins,
        until=run.ends,
        state="ended",
        outcome=run.outcome,
        suspended=suspensions(run.moves, run.begins, run.ends),
        reserved_mb=run.reserved_mb,
    )
    for lane in _lanes(run.devices, run.engine, snapshot):
        yield TimelineEntry(lane=lane, run=row)


def _arrange(
    entries: list[TimelineEntry], snapshot: Snapshot, left_out: int, since: float, until: float
) -> JobTimeline:
    entries.sort(key=lambda entry: (entry.run.until is None, entry.run.until or entry.run.since), reverse=True)
    left_out += max(0, len(entries) - _MAX_ENTRIES)
    del entries[_MAX_ENTRIES:]
    lanes = _order_lanes(snapshot, (entry.lane for entry in entries))
    places = {lane: place for place, lane in enumerate(lanes)}
    spans = [TimelineSpan(lane=places[each.lane], start=each.run.since, end=each.run.until) for each in entries]
    rows = assign_rows(spans)
    counted = count_rows(spans, rows)
    return JobTimeline(
        since=since,
        until=until,
        lanes=[
            LaneRow(device=lane.device, label=lane.label, name=lane.name, rows=counted.get(place, 1))
            for place, lane in enumerate(lanes)
        ],
        stretches=[
            replace(each.run, lane=span.lane, row=row) for each, span, row in zip(entries, spans, rows, strict=True)
        ],
        left_out=left_out,
    )


def _order_lanes(snapshot: Snapshot, used: Iterable[TimelineLane]) -> list[TimelineLane]:
    """Return all usable devices, with or without entries, then other devices of entries, the CPU, cluster engines."""
    usable = [_device_lane(device.id, snapshot) for device in snapshot.usable_devices()]
    others = set(used) - set(usable)
    return usable + sorted(others, key=lambda lane: (lane.device is None, lane.label != _CPU, lane.label))


def _lanes(devices: tuple[str, ...], engine: str, snapshot: Snapshot) -> list[TimelineLane]:
    if engine:
        return [TimelineLane(device=None, label=engine, name=None)]
    return [_device_lane(device_id, snapshot) for device_id in devices] or [TimelineLane(device=None, label=_CPU)]


def _device_lane(device_id: str, snapshot: Snapshot) -> TimelineLane:
    device = snapshot.device(device_id)
    if device is None or device.index is None:
        return TimelineLane(device=device_id, label=device_id, name=None if device is None else device.name)
    return TimelineLane(device=device_id, label=f"GPU {device.index}", name=device.name)


def _shorten(command: str) -> str:
    return command if len(command) <= _MAX_COMMAND else f"{command[:_MAX_COMMAND]}…"
