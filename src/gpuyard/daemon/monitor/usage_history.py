"""The usage of the devices and the host in the last day, for charts.

- A span of 10 minutes, an hour or a day has 300 steps, and keeps the means of what was measured in each: its size is
  bounded. While the machine is not sampled nothing is added, which leaves a gap.
- A file lets the next daemon go on. It is replaced once a minute while the machine is sampled, and when the daemon
  ends. Nothing depends on it: one that cannot be read or written is reported once.
"""

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from gpuyard.daemon.api.codec import encode
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.monitor.devices import DeviceList
from gpuyard.daemon.server.http_messages import Response
from gpuyard.errors import EnvironmentFault
from gpuyard.queue.step import Step
from gpuyard.schema.machine import DeviceHistory, DeviceSeries, HostSeries
from gpuyard.schema.requests import DeviceHistoryQuery
from gpuyard.system.private_files import PrivateFileError, read_own
from gpuyard.system.write_files import write_atomically

NAME = "usage-history"
MAX_POINTS = 300
_MOST_DEVICES = 256
# In place of a device's id.
HOST = ""
_log = logging.getLogger(__name__)

Values = tuple[float | None, ...]
# When a step begins, in queue time, and the mean of each column in it; None where nothing was measured.
Point = tuple[float, Values]


class StoredHistory(Struct, frozen=True, kw_only=True):
    """The points of each device, by the names of the spans and the ids of the devices."""

    spans: dict[str, dict[str, list[Point]]]
    format: int = 2


class HistorySpan:
    """The points of the host and of all devices. A device that has gone keeps its past."""

    def __init__(self, span_s: int) -> None:
        self.span_s, self.step_s = span_s, span_s / MAX_POINTS
        self._complete = defaultdict[str, deque[Point]](lambda: deque(maxlen=MAX_POINTS))
        self._steps: dict[str, tuple[float, list[Values]]] = {}  # the step that has begun: when, and its rows

    def add(self, at: float, rows: Mapping[str, Values]) -> None:
        start = at // self.step_s * self.step_s
        for name, row in rows.items():
            before = self._steps.get(name)
            if before is None and len(self._steps) > _MOST_DEVICES:
                continue
            if before is not None and before[0] == start:
                before[1].append(row)
                continue
            if before is not None:
                self._complete[name].append(_mean(*before))
            self._steps[name] = start, [row]

    def points(self) -> dict[str, list[Point]]:
        """Return all points; the last ones may be incomplete."""
        found = {name: list(points) for name, points in self._complete.items()}
        for name, step in self._steps.items():
            found.setdefault(name, []).append(_mean(*step))
        return found

    def restore(self, stored: Mapping[str, list[Point]], now: float) -> None:
        """Begin with what was stored, as far as it is of this span and has our columns."""
        for name, points in list(stored.items())[: _MOST_DEVICES + 1]:
            _, *columns = (HostSeries if name == HOST else DeviceSeries).__struct_fields__
            self._complete[name].extend(
                each for each in points if now - self.span_s < each[0] <= now and len(each[1]) == len(columns)
            )

    def as_answer(self, now: float, to_wall: Callable[[float], float] = float) -> DeviceHistory:
        series = {
            name: [point for point in points if point[0] > now - self.span_s][-MAX_POINTS:]
            for name, points in self.points().items()
        }
        host = _columns(series.pop(HOST, []), HostSeries.__struct_fields__, to_wall)
        devices = {
            name: DeviceSeries(**_columns(points, DeviceSeries.__struct_fields__, to_wall))
            for name, points in series.items()
            if points
        }
        return DeviceHistory(span_s=self.span_s, step_s=self.step_s, devices=devices, host=HostSeries(**host))


def _mean(start: float, rows: list[Values]) -> Point:
    known = ([value for value in column if value is not None] for column in zip(*rows, strict=True))
    return start, tuple(round(sum(values) / len(values), 1) if values else None for values in known)


def _columns(points: list[Point], names: tuple[str, ...], to_wall: Callable[[float], float]) -> dict[str, Any]:
    rows = [chain([to_wall(at)], row) for at, row in points]
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)) if rows else {name: [] for name in names}


class UsageHistory:
    def __init__(self, scheduler: SchedulerLoop, devices: DeviceList, folder: Path) -> None:
        self._scheduler, self._devices = scheduler, devices
        self._path = folder / NAME
        self._spans = {"10m": HistorySpan(600), "1h": HistorySpan(3600), "24h": HistorySpan(86_400)}
        self._bodies: dict[str, bytes] = {}
        self._added_at = self._saved_at = float("-inf")
        self._adding: asyncio.Task[None] | None = None
        self._has_failed = False
        stored = read_history(self._path)
        for name, span in self._spans.items():
            span.restore(stored.spans.get(name, {}), scheduler.clock.now())
        scheduler.listeners.append(self._after_step)

    def close(self) -> None:
        """Store what was added since the file was last written."""
        if self._saved_at < self._added_at:
            self._save({name: span.points() for name, span in self._spans.items()})

    def history(self, query: DeviceHistoryQuery) -> Response:
        name = query.span
        if name not in self._bodies:
            clock = self._scheduler.clock
            self._bodies[name] = encode(self._spans[name].as_answer(clock.now(), clock.to_wall))
        return Response(body=self._bodies[name])

    def _after_step(self, _: Step) -> None:
        at = self._scheduler.sampling.latest.snapshot.taken_at
        # Many samples a second may arrive while jobs come and go; about one a second is added.
        if at is not None and self._adding is None and at >= self._added_at + 0.9:
            self._added_at = at
            self._adding = asyncio.ensure_future(self._add(at))
            self._adding.add_done_callback(self._on_added)

    def _on_added(self, task: "asyncio.Task[None]") -> None:
        self._adding = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a sample could not be added to the history", exc_info=error)

    async def _add(self, at: float) -> None:
        try:
            users = await self._devices.users()
        except EnvironmentFault as error:
            _log.warning("%s; this sample is missing in the history", error)
            return
        host = users.snapshot.host
        rows: dict[str, Values] = {HOST: (host.cpu_percent, host.memory_used_mb)}
        for device in users.snapshot.devices:
            parts = users.breakdown(device)
            memory = parts.own_used_mb, parts.others_used_mb, parts.foreign_mb, device.memory_used_mb
            rows[device.id] = (*memory, device.utilization_percent, device.power_draw_w)
        for span in self._spans.values():
            span.add(at, rows)
        self._bodies.clear()
        if at >= self._saved_at + 60.0:
            self._saved_at = at
            await asyncio.to_thread(self._save, {name: span.points() for name, span in self._spans.items()})

    def _save(self, spans: dict[str, dict[str, list[Point]]]) -> None:
        try:
            content = msgspec.json.encode(StoredHistory(spans=spans))
            write_atomically(self._path, content, exact_mode=0o600, is_synced=False)
        except OSError as error:
            if not self._has_failed:
                _log.warning("%s cannot be written: %s; the next daemon lacks this history", self._path, error.strerror)
            self._has_failed = True
        else:
            self._has_failed = False


def read_history(path: Path) -> StoredHistory:
    """Return the stored history; an empty one if there is none that can be used."""
    nothing = StoredHistory(spans={})
    try:
        found = msgspec.json.decode(read_own(str(path)), type=StoredHistory)
        return found if found.format == nothing.format else nothing
    except FileNotFoundError:
        return nothing
    except (OSError, PrivateFileError, msgspec.MsgspecError) as error:
        _log.warning("%s cannot be read: %s; the history of the GPUs begins anew", path, error)
        return nothing
