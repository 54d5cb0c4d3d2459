"""Looks at the machine from a thread of its own, so that a driver that hangs never holds up the daemon's loop."""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from gpuyard.core.sample import Sample
from gpuyard.core.snapshot import Host, Snapshot
from gpuyard.ports import Clock
from gpuyard.probes.sampler import Sampler

_log = logging.getLogger(__name__)
_AFTER_TROUBLE_S = 1.0
NOTHING_SEEN = Sample(snapshot=Snapshot(taken_at=None, host=Host()))


class SamplingThread:
    """The latest look, and a new one on demand; whoever asks while one is under way gets that one."""

    def __init__(
        self,
        sampler: Sampler,
        clock: Clock,
        on_look: Callable[[], None],
        measure_ram: Callable[[], Mapping[tuple[int, int], float]] = dict,
    ) -> None:
        self.latest = NOTHING_SEEN
        self._sampler = sampler
        self._clock = clock
        self._on_look = on_look
        self._measure_ram = measure_ram
        self._looked_at: float | None = None
        self._asked = threading.Event()
        self._is_over = False
        self._loop = asyncio.get_running_loop()
        self._under_way: asyncio.Future[Sample] | None = None
        threading.Thread(target=self._run, name="gpuyard-looks", daemon=True).start()

    def now(self) -> float:
        return self._clock.now()

    def age(self) -> float:
        """Seconds since the latest look was there. How long it took does not count: where looks take longer than they
        may be old, nothing would ever start."""
        return float("inf") if self._looked_at is None else self._clock.monotonic() - self._looked_at

    def request(self) -> "asyncio.Future[Sample]":
        """A look that begins now or has begun a moment ago; `on_look` is called when it is there."""
        if self._under_way is None:
            self._under_way = self._loop.create_future()
            self._asked.set()
        return self._under_way

    async def fresh(self, within_s: float) -> Sample:
        """The latest look, if it is no older than that, else a new one."""
        return self.latest if self.age() <= within_s else await asyncio.shield(self.request())

    def close(self) -> None:
        self._is_over = True
        self._asked.set()

    def _run(self) -> None:
        while self._asked.wait() and not self._is_over:
            self._asked.clear()
            look = self._look()
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._arrive, look)

    def _look(self) -> Sample:
        try:
            return replace(self._sampler.sample(), ram_mb=self._measure_ram())
        except Exception:  # noqa: BLE001 - the daemon's loop waits for it, and would wait for ever
            _log.exception("the machine could not be looked at")
            self._clock.sleep(_AFTER_TROUBLE_S)  # whoever waits for a look asks again at once
            return self.latest

    def _arrive(self, look: Sample) -> None:
        self.latest, self._looked_at = look, self._clock.monotonic()
        waiting, self._under_way = self._under_way, None
        if waiting is not None and not waiting.done():
            waiting.set_result(look)
        self._on_look()
