"""The route `/timeline`: which job ran on which device and when, with one lane per device."""

import sqlite3
from collections.abc import Callable, Iterator

from msgspec.structs import replace

from gpuyard.daemon.api.codec import copy_fields, encode
from gpuyard.daemon.api.slow_requests import ThreadedReader
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.server.http_messages import Response
from gpuyard.errors import UserError
from gpuyard.model.job import Attempt
from gpuyard.model.machine_snapshot import Snapshot
from gpuyard.model.selection import LONGEST_S
from gpuyard.model.units import parse_duration
from gpuyard.report.chart_rows import TimelineSpan, assign_rows, count_rows, suspensions
from gpuyard.schema.machine import JobTimeline, LaneRow, TimelineRun
from gpuyard.schema.requests import TimelineQuery
from gpuyard.store.past_attempts import PastRun, runs_between

_MAX_ENTRIES = 2000
_CPU = "CPU"
# One attempt in one lane; the numbers of its lane and row are filled in at the end.
TimelineEntry = tuple[LaneRow, TimelineRun]
ToWall = Callable[[float], float]


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
        snapshot = self._scheduler.sampling.latest.snapshot
        running = [entry for each in self._running() for entry in _entries(*each, snapshot)]
        to_wall = self._scheduler.clock.to_wall
        body = await self._reader.read(lambda past: _render(past, running, snapshot, (since, until), to_wall))
        return Response(body=body)

    def _running(self) -> Iterator[tuple[TimelineRun, Attempt]]:
        for live in self._scheduler.controller.transitions.live.values():
            job, attempt = live.job, live.attempt
            if attempt.started is None:
                continue
            was_suspended = attempt.suspended_at is not None or attempt.suspended_s
            events = self._scheduler.queries.events(job.id) if was_suspended else []
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
            yield row, attempt


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
