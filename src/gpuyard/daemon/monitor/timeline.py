"""What ran where and when: a lane for each device, in which jobs that share it stand side by side."""

import json
import math
import sqlite3
import time
from collections.abc import Iterable, Iterator

from msgspec import Struct

from gpuyard.core.job.job import Attempt, Job
from gpuyard.core.report.timeline_rows import TimelineSpan, assign_rows, count_rows, suspensions
from gpuyard.core.snapshot import Snapshot
from gpuyard.core.units import parse_duration
from gpuyard.daemon.api.parameters import read_number
from gpuyard.daemon.api.read_in_thread import ThreadedReader
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.server.http_parser import Request, Response
from gpuyard.daemon.server.router import Answer, Routes
from gpuyard.errors import UserError
from gpuyard.store.past_runs import PastRun, runs_between

MOST_STRETCHES = 2000
_LONGEST_S = 366 * 86_400.0
_LONGEST_COMMAND = 300
_CPU = "CPU"
# How many places there are in a picture of it, and how long it may be the same.
_PLACES, _STAYS_MOST_S = 1200.0, 60.0
# Of how many spans it is kept for the next who asks: each may be a megabyte.
_MOST_TOLD = 16


class DeviceTimeline(Struct, frozen=True, kw_only=True):
    """A device, or the CPU, or an engine elsewhere."""

    device: str | None
    label: str
    name: str | None = None


class TimelineEntry(Struct, frozen=True, kw_only=True):
    """One run in one lane, as far as it is known so far."""

    lane: DeviceTimeline
    begins: float
    ends: float | None
    told: Answer


class RunningEntry(Struct, frozen=True, kw_only=True):
    """What runs, and what was noted of it since it began: when it was suspended, and when it went on."""

    job: Job
    attempt: Attempt
    moves: tuple[tuple[float, str], ...]


class Timeline:
    def __init__(self, scheduler: SchedulerLoop, reader: ThreadedReader) -> None:
        self._scheduler = scheduler
        self._reader = reader
        self._told: dict[float, tuple[float, Response]] = {}

    def routes(self) -> Routes:
        return {("GET", "/timeline"): self._timeline}

    async def _timeline(self, request: Request) -> Response:
        span_s = parse_duration(request.query.get("span", "1h"))
        if not 0 < span_s <= _LONGEST_S:
            raise UserError("that is no span of time", hint="ask for 10m, 1h or 7d")
        if "until" in request.query:
            until = read_number(request.query["until"], 0.0)
            if not math.isfinite(until):
                raise UserError("until is no time", hint="give it in seconds since 1970")
            return await self._between(until - span_s, until)
        return await self._until_now(span_s)

    async def _until_now(self, span_s: float) -> Response:
        """No more often than could be seen: those who watch a whole hour need not be told of each second."""
        now, stays_s = time.time(), min(_STAYS_MOST_S, span_s / _PLACES)
        recent = [(each, told) for each, told in self._told.items() if now - _STAYS_MOST_S < told[0] <= now]
        self._told = dict(recent[-_MOST_TOLD:])
        if span_s not in self._told or now - self._told[span_s][0] > stays_s:
            self._told[span_s] = now, await self._between(now - span_s, now)
        return self._told[span_s][1]

    async def _between(self, since: float, until: float) -> Response:
        snapshot, running = self._scheduler.sampling.latest.snapshot, list(self._running())
        body = await self._reader.read(lambda past: _told(past, running, snapshot, since, until))
        return Response(body=body)

    def _running(self) -> Iterator[RunningEntry]:
        for live in self._scheduler.controller.transitions.live.values():
            if live.attempt.has_started:
                yield RunningEntry(job=live.job, attempt=live.attempt, moves=self._moves(live.attempt))

    def _moves(self, attempt: Attempt) -> tuple[tuple[float, str], ...]:
        if attempt.suspended_at is None and not attempt.suspended_s:
            return ()
        return tuple((at, kind) for at, kind, _ in self._scheduler.queries.events(attempt.job_id))


def _told(
    past: sqlite3.Connection, running: list[RunningEntry], snapshot: Snapshot, since: float, until: float
) -> bytes:
    runs, left_out = runs_between(past, since, until, MOST_STRETCHES)
    seen = {(each.job.id, each.attempt.number) for each in running}
    entries = [entry for each in running if each.attempt.started_at < until for entry in _of_running(each, snapshot)]
    for run in runs:
        if (run.job, run.attempt) not in seen:  # it may have ended in between
            entries += _of_run(run, snapshot)
    return json.dumps({"from": since, "until": until, **_arranged(entries, snapshot, left_out)}).encode()


def _of_running(running: RunningEntry, snapshot: Snapshot) -> Iterator[TimelineEntry]:
    job, attempt = running.job, running.attempt
    told = {
        "job": job.id,
        "attempt": attempt.number,
        "name": job.spec.name,
        "command": _shortened(" ".join(job.argv)),
        "user": job.user,
        "state": str(job.state),
        "outcome": None,
        "suspended": suspensions(running.moves, attempt.started_at, None),
        "reserved_mb": attempt.reserved_mb,
    }
    for lane in _lanes_of(attempt.devices, attempt.engine, snapshot):
        yield TimelineEntry(lane=lane, begins=attempt.started_at, ends=None, told=told)


def _of_run(run: PastRun, snapshot: Snapshot) -> Iterator[TimelineEntry]:
    if run.engine and run.place is None:
        return  # it never began there
    told = {
        "job": run.job,
        "attempt": run.attempt,
        "name": run.name,
        "command": _shortened(run.command),
        "user": run.user,
        "state": "ended",
        "outcome": str(run.outcome),
        "suspended": suspensions(run.moves, run.begins, run.ends),
        "reserved_mb": run.reserved_mb,
    }
    for lane in _lanes_of(run.devices, run.engine, snapshot):
        yield TimelineEntry(lane=lane, begins=run.begins, ends=run.ends, told=told)


def _arranged(entries: list[TimelineEntry], snapshot: Snapshot, left_out: int) -> Answer:
    entries.sort(key=lambda entry: (entry.ends is None, entry.ends or entry.begins), reverse=True)
    left_out += max(0, len(entries) - MOST_STRETCHES)
    del entries[MOST_STRETCHES:]
    lanes = _ordered(snapshot, (entry.lane for entry in entries))
    places = {lane: place for place, lane in enumerate(lanes)}
    spans = [TimelineSpan(lane=places[each.lane], start=each.begins, end=each.ends) for each in entries]
    rows = assign_rows(spans)
    counted = count_rows(spans, rows)
    return {
        "lanes": [
            {"device": lane.device, "label": lane.label, "name": lane.name, "rows": counted.get(place, 1)}
            for place, lane in enumerate(lanes)
        ],
        "stretches": [
            {**each.told, "lane": span.lane, "row": row, "from": each.begins, "until": each.ends}
            for each, span, row in zip(entries, spans, rows, strict=True)
        ],
        "left_out": left_out,
    }


def _ordered(snapshot: Snapshot, used: Iterable[DeviceTimeline]) -> list[DeviceTimeline]:
    """Devices that can be used, whether anything ran there or not; then others that were, the CPU, and elsewhere."""
    usable = [_lane_of(device.id, snapshot) for device in snapshot.usable_devices()]
    others = set(used) - set(usable)
    return usable + sorted(others, key=lambda lane: (lane.device is None, lane.label != _CPU, lane.label))


def _lanes_of(devices: tuple[str, ...], engine: str, snapshot: Snapshot) -> list[DeviceTimeline]:
    if engine:
        return [DeviceTimeline(device=None, label=engine, name=None)]
    return [_lane_of(device_id, snapshot) for device_id in devices] or [DeviceTimeline(device=None, label=_CPU)]


def _lane_of(device_id: str, snapshot: Snapshot) -> DeviceTimeline:
    device = snapshot.device(device_id)
    if device is None or device.index is None:
        return DeviceTimeline(device=device_id, label=device_id, name=None if device is None else device.name)
    return DeviceTimeline(device=device_id, label=f"GPU {device.index}", name=device.name)


def _shortened(command: str) -> str:
    return command if len(command) <= _LONGEST_COMMAND else f"{command[:_LONGEST_COMMAND]}…"
