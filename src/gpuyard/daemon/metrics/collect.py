"""The route `/metrics`: counts events as they happen and writes them in the Prometheus format on request."""

import asyncio

from gpuyard.control.controller import Step
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.metrics.counters import EventCounters
from gpuyard.daemon.metrics.prometheus_text import Scrape, write_metrics
from gpuyard.daemon.monitor.device_list import DeviceList, DeviceUsers
from gpuyard.daemon.server.http_parser import Request, Response
from gpuyard.daemon.server.router import Routes
from gpuyard.errors import EnvironmentFault

_FRESH_S = 0.5
# Prometheus itself times out after 10 s.
_LEDGER_S = 2.0
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    def __init__(self, scheduler: SchedulerLoop, devices: DeviceList, started_at: float) -> None:
        self._scheduler = scheduler
        self._devices = devices
        self._started_at = started_at
        self._counters = EventCounters()
        scheduler.listeners.append(self._count)

    def routes(self) -> Routes:
        return {("GET", "/metrics"): self._metrics}

    def _count(self, step: Step) -> None:
        scheduler, snapshot = self._scheduler, self._scheduler.sampling.latest.snapshot
        self._counters.count(step, scheduler.step_s or 0.0, scheduler.controller.plan, snapshot)

    async def _metrics(self, _: Request) -> Response:
        sample = await self._scheduler.sampling.fresh(_FRESH_S)
        users = await self._device_users()
        store = self._scheduler.store
        scrape = Scrape(
            started_at=self._started_at,
            is_paused=bool(store.setting("paused")),
            counts=store.counts(),
            snapshot=sample.snapshot,
            breakdowns={} if users is None else {each.id: users.breakdown(each) for each in users.snapshot.devices},
            leases={} if users is None else _count_leases(users),
            counters=self._counters,
        )
        return Response(body=write_metrics(scrape), content_type=_CONTENT_TYPE)

    async def _device_users(self) -> DeviceUsers | None:
        """Return None if the ledger is not read in time: the other metrics are still useful; `/devices` says why."""
        try:
            return await asyncio.wait_for(self._devices.users(), _LEDGER_S)
        except (EnvironmentFault, TimeoutError):
            return None


def _count_leases(users: DeviceUsers) -> dict[str, int]:
    own = sum(lease.id in users.jobs for lease in users.leases)
    return {"own": own, "others": len(users.leases) - own}
