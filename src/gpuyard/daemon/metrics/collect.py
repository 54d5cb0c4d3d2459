"""The daemon's figures for Prometheus: counted as things happen, put into words only when somebody asks."""

import asyncio

from gpuyard.control.step import Step
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.metrics.counters import EventCounters
from gpuyard.daemon.monitor.device_list import DeviceList, DeviceUsers
from gpuyard.daemon.server.http_parser import Request, Response
from gpuyard.daemon.server.router import Routes
from gpuyard.errors import EnvironmentFault

_FRESH_S = 0.5
# Prometheus gives up after ten seconds.
_LEDGER_S = 2.0
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    def __init__(self, scheduler: SchedulerLoop, devices: DeviceList, started_at: float) -> None:
        self._scheduler = scheduler
        self._devices = devices
        self._started_at = started_at
        self._tally = EventCounters()
        scheduler.listeners.append(self._note)

    def routes(self) -> Routes:
        return {("GET", "/metrics"): self._tell}

    def _note(self, step: Step) -> None:
        scheduler = self._scheduler
        self._tally.note(step, scheduler.step_s or 0.0, scheduler.controller.plan, scheduler.sampling.latest.snapshot)

    async def _tell(self, _: Request) -> Response:
        # Imported when the first asks, as an idle daemon is to be small, and by another thread: it takes 40 ms.
        await asyncio.get_running_loop().run_in_executor(None, _import_exposition)
        from gpuyard.daemon.metrics.prometheus_text import Scrape, expose

        look = await self._scheduler.sampling.fresh(_FRESH_S)
        taken = await self._taken()
        store = self._scheduler.store
        scrape = Scrape(
            started_at=self._started_at,
            is_paused=bool(store.setting("paused")),
            counts=store.counts(),
            snapshot=look.snapshot,
            parts={} if taken is None else {each.id: taken.breakdown(each) for each in taken.snapshot.devices},
            leases={} if taken is None else _by_whose(taken),
            tally=self._tally,
        )
        return Response(body=expose(scrape), content_type=_CONTENT_TYPE)

    async def _taken(self) -> DeviceUsers | None:
        """`None` where the ledger cannot be read in time: the rest is worth knowing then, and `/devices` says why."""
        try:
            return await asyncio.wait_for(self._devices.taken(), _LEDGER_S)
        except (EnvironmentFault, TimeoutError):
            return None


def _by_whose(taken: DeviceUsers) -> dict[str, int]:
    own = sum(lease.id in taken.jobs for lease in taken.leases)
    return {"own": own, "others": len(taken.leases) - own}


def _import_exposition() -> None:
    import gpuyard.daemon.metrics.prometheus_text  # noqa: F401 - for those who import it next
