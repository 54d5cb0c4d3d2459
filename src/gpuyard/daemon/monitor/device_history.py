"""The usage history of every device and of the host over the last 10 minutes, hour and day.

Each span has its own step and stores means over that step, so its size is bounded however long the daemon runs. While
the machine is not sampled nothing is stored, which leaves a gap.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from typing import Any

from gpuyard.control.controller import Step
from gpuyard.core.snapshot import Device
from gpuyard.daemon.api.codec import encode
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.monitor.device_list import DeviceList, DeviceUsers
from gpuyard.daemon.server.http_parser import Response
from gpuyard.errors import EnvironmentFault
from gpuyard.schema.machine import DeviceHistory, DeviceSeries, HostSeries
from gpuyard.schema.requests import DeviceHistoryQuery

_log = logging.getLogger(__name__)
MAX_POINTS = 300
_SPANS_S = {"10m": 600, "1h": 3600, "24h": 86_400}
# Many samples a second may arrive while jobs come and go; about one a second is stored.
_EVERY_S = 0.9
_DEVICE_COLUMNS = DeviceSeries.__struct_fields__[1:]
_HOST_COLUMNS = HostSeries.__struct_fields__[1:]
_MAX_DEVICES = 256

Values = tuple[float | None, ...]


class UsageSeries:
    """Means of each column per step; the last step may be incomplete."""

    def __init__(self, columns: tuple[str, ...], step_s: float) -> None:
        self._columns = columns
        self._step_s = step_s
        self._complete: deque[tuple[float, Values]] = deque(maxlen=MAX_POINTS)
        self._step_start: float | None = None
        self._sums: list[tuple[float, int]] = []

    def add(self, at: float, row: Values) -> None:
        start = at // self._step_s * self._step_s
        if start != self._step_start:
            if self._step_start is not None:
                self._complete.append((self._step_start, self._means()))
            self._step_start, self._sums = start, [(0.0, 0)] * len(self._columns)
        self._sums = [
            (total, count) if value is None else (total + value, count + 1)
            for (total, count), value in zip(self._sums, row, strict=True)
        ]

    def since(self, at: float) -> dict[str, Any]:
        last = [] if self._step_start is None else [(self._step_start, self._means())]
        points = [point for point in (*self._complete, *last) if point[0] > at][-MAX_POINTS:]
        columns: dict[str, list[float | None]] = {
            name: [row[place] for _, row in points] for place, name in enumerate(self._columns)
        }
        return {"at": [start for start, _ in points], **columns}

    def _means(self) -> Values:
        return tuple(round(total / count, 1) if count else None for total, count in self._sums)


class HistorySpan:
    """The series of all devices and of the host over one span. A device that has gone keeps its past."""

    def __init__(self, span_s: int) -> None:
        self.span_s = span_s
        self.step_s = span_s / MAX_POINTS
        self._devices: dict[str, UsageSeries] = {}
        self._host = UsageSeries(_HOST_COLUMNS, self.step_s)

    def add(self, at: float, devices: Mapping[str, Values], host: Values) -> None:
        self._host.add(at, host)
        for device_id, row in devices.items():
            if device_id not in self._devices and len(self._devices) < _MAX_DEVICES:
                self._devices[device_id] = UsageSeries(_DEVICE_COLUMNS, self.step_s)
            if device_id in self._devices:
                self._devices[device_id].add(at, row)

    def as_answer(self, now: float) -> DeviceHistory:
        since = now - self.span_s
        return DeviceHistory(
            span_s=self.span_s,
            step_s=self.step_s,
            devices={device_id: DeviceSeries(**series.since(since)) for device_id, series in self._devices.items()},
            host=HostSeries(**self._host.since(since)),
        )


class UsageHistory:
    def __init__(self, scheduler: SchedulerLoop, devices: DeviceList) -> None:
        self._scheduler = scheduler
        self._devices = devices
        self._spans = {name: HistorySpan(seconds) for name, seconds in _SPANS_S.items()}
        self._bodies: dict[str, bytes] = {}
        self._added_at = float("-inf")
        self._adding: asyncio.Task[None] | None = None
        scheduler.listeners.append(self._after_step)

    def history(self, query: DeviceHistoryQuery) -> Response:
        name = query.span
        if name not in self._bodies:
            self._bodies[name] = encode(self._spans[name].as_answer(self._scheduler.sampling.now()))
        return Response(body=self._bodies[name])

    def _after_step(self, _: Step) -> None:
        at = self._scheduler.sampling.latest.snapshot.taken_at
        if at is None or self._adding is not None:
            return
        # A time before the last one: the clock was set back.
        if at >= self._added_at + _EVERY_S or at < self._added_at:
            self._added_at = at
            self._adding = asyncio.ensure_future(self._add())
            self._adding.add_done_callback(self._on_added)

    def _on_added(self, task: "asyncio.Task[None]") -> None:
        self._adding = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a sample could not be added to the history", exc_info=error)

    async def _add(self) -> None:
        try:
            users = await self._devices.users()
        except EnvironmentFault as error:
            _log.warning("%s; this sample is missing in the history", error)
            return
        at = users.snapshot.taken_at
        if at is None:
            return
        devices = {device.id: _device_row(users, device) for device in users.snapshot.devices}
        host = users.snapshot.host
        total, available = host.memory_total_mb, host.memory_available_mb
        used = None if total is None or available is None else total - available
        for span in self._spans.values():
            span.add(at, devices, (host.cpu_percent, used))
        self._bodies.clear()


def _device_row(users: DeviceUsers, device: Device) -> Values:
    parts = users.breakdown(device)
    memory = parts.own.used_mb, parts.others.used_mb, parts.foreign_mb, device.memory_used_mb
    return (*memory, device.utilization_percent, device.power_draw_w)
