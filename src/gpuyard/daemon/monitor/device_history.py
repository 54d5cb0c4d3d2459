"""How the machine was used of late: of every device and of the host, for the last minutes, hours and day.

Each span is kept at a step of its own, as means over that step, so that it is a bounded number of points however
long the daemon runs. While nobody looks at the machine there is nothing to keep: that is a gap.
"""

import asyncio
import json
import logging
from collections import deque
from collections.abc import Iterator, Mapping

from gpuyard.control.step import Step
from gpuyard.core.snapshot import Device, Host
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.monitor.device_list import DeviceList, DeviceUsers
from gpuyard.daemon.server.http_parser import Request, Response
from gpuyard.daemon.server.router import Answer, Routes
from gpuyard.errors import EnvironmentFault, UserError

_log = logging.getLogger(__name__)
MOST_POINTS = 300
_SPANS_S = {"10m": 600, "1h": 3600, "24h": 86_400}
# Looks may come many in a second while jobs come and go.
_EVERY_S = 0.9
_OF_DEVICE = ("own_mb", "others_mb", "foreign_mb", "used_mb", "utilization_percent", "power_w")
_OF_HOST = ("cpu_percent", "memory_used_mb")
# A device that was not seen for as long as the longest span has nothing to be kept.
_MOST_DEVICES = 256

Figures = tuple[float | None, ...]


class UsageSeries:
    """Figures over time, as means over steps; the last step may still go on."""

    def __init__(self, names: tuple[str, ...], step_s: float) -> None:
        self._names = names
        self._step_s = step_s
        self._done: deque[tuple[float, Figures]] = deque(maxlen=MOST_POINTS)
        self._begun: float | None = None
        self._sums: list[tuple[float, int]] = []

    def add(self, at: float, figures: Figures) -> None:
        begins = at // self._step_s * self._step_s
        if begins != self._begun:
            if self._begun is not None:
                self._done.append((self._begun, self._means()))
            self._begun, self._sums = begins, [(0.0, 0)] * len(self._names)
        self._sums = [
            (total, count) if figure is None else (total + figure, count + 1)
            for (total, count), figure in zip(self._sums, figures, strict=True)
        ]

    def since(self, at: float) -> Answer:
        points = [point for point in self._points() if point[0] > at][-MOST_POINTS:]
        columns: dict[str, list[float | None]] = {
            name: [figures[place] for _, figures in points] for place, name in enumerate(self._names)
        }
        return {"at": [begins for begins, _ in points], **columns}

    def _points(self) -> Iterator[tuple[float, Figures]]:
        yield from self._done
        if self._begun is not None:
            yield self._begun, self._means()

    def _means(self) -> Figures:
        return tuple(round(total / count, 1) if count else None for total, count in self._sums)


class Span:
    """All that is kept of one span."""

    def __init__(self, span_s: int) -> None:
        self.span_s = span_s
        self.step_s = span_s / MOST_POINTS
        self._devices: dict[str, UsageSeries] = {}
        self._host = UsageSeries(_OF_HOST, self.step_s)

    def add(self, at: float, devices: Mapping[str, Figures], host: Figures) -> None:
        self._host.add(at, host)
        for device_id, figures in devices.items():
            if device_id not in self._devices and len(self._devices) < _MOST_DEVICES:
                self._devices[device_id] = UsageSeries(_OF_DEVICE, self.step_s)
            if device_id in self._devices:
                self._devices[device_id].add(at, figures)

    def told(self, now: float) -> Answer:
        since = now - self.span_s
        return {
            "span_s": self.span_s,
            "step_s": self.step_s,
            "devices": {device_id: series.since(since) for device_id, series in self._devices.items()},
            "host": self._host.since(since),
        }


class UsageHistory:
    def __init__(self, scheduler: SchedulerLoop, devices: DeviceList) -> None:
        self._scheduler = scheduler
        self._devices = devices
        self._spans = {name: Span(seconds) for name, seconds in _SPANS_S.items()}
        self._told: dict[str, bytes] = {}
        self._last_at = float("-inf")
        self._adding: asyncio.Task[None] | None = None
        scheduler.listeners.append(self._changed)

    def routes(self) -> Routes:
        return {("GET", "/devices/history"): self._history}

    def _history(self, request: Request) -> Response:
        name = request.query.get("span", "10m")
        if name not in self._spans:
            raise UserError(f"'{name[:20]}' is not kept", hint=f"ask for {', '.join(_SPANS_S)}")
        if name not in self._told:
            self._told[name] = json.dumps(self._spans[name].told(self._scheduler.sampling.now())).encode()
        return Response(body=self._told[name])

    def _changed(self, _: Step) -> None:
        at = self._scheduler.sampling.latest.snapshot.taken_at
        if at is None or self._adding is not None:
            return
        # Earlier than the last: somebody has set the clock back.
        if at >= self._last_at + _EVERY_S or at < self._last_at:
            self._last_at = at
            self._adding = asyncio.ensure_future(self._add())
            self._adding.add_done_callback(self._added)

    def _added(self, task: "asyncio.Task[None]") -> None:
        self._adding = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("what was seen could not be kept", exc_info=error)

    async def _add(self) -> None:
        try:
            taken = await self._devices.taken()
        except EnvironmentFault as error:
            _log.warning("%s; that second is left out of the history", error)
            return
        at = taken.snapshot.taken_at
        if at is None:
            return
        devices = {device.id: _of_device(taken, device) for device in taken.snapshot.devices}
        for span in self._spans.values():
            span.add(at, devices, _of_host(taken.snapshot.host))
        self._told.clear()


def _of_device(taken: DeviceUsers, device: Device) -> Figures:
    parts = taken.breakdown(device)
    return (
        parts.own.used_mb,
        parts.others.used_mb,
        parts.foreign_mb,
        device.memory_used_mb,
        device.utilization_percent,
        device.power_draw_w,
    )


def _of_host(host: Host) -> Figures:
    total, available = host.memory_total_mb, host.memory_available_mb
    return host.cpu_percent, None if total is None or available is None else total - available
