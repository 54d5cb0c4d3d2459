"""Sample the machine in a thread of its own, and write the sample logs of batches."""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from gpuyard.errors import GpuyardError
from gpuyard.model.machine_snapshot import Host, Sample, Snapshot
from gpuyard.policy.usage_curve import READ_OFTEN_EVERY_S
from gpuyard.ports import Clock
from gpuyard.probes.sampler import Sampler
from gpuyard.queue.batch_gates import COLUMNS

if TYPE_CHECKING:
    from gpuyard.probes.sample_log import RowLog

_log = logging.getLogger(__name__)


class SamplingThread:
    """Hold the latest sample and take a new one on request; requests made meanwhile share it. A driver that hangs never
    blocks the daemon's loop.

    In between, the memory of `watched` devices is read often, the RAM of the host every `host_every_s`, and `on_memory`
    is called. That makes the latest sample no younger: other figures in it are as old as before.
    """

    def __init__(  # noqa: PLR0913 - what is read, and who hears of it
        self,
        sampler: Sampler,
        clock: Clock,
        on_sample: Callable[[], None],
        measure_ram: Callable[..., Mapping[tuple[int, int], float]] = dict,
        *,
        on_memory: Callable[[], None] = lambda: None,
        measure_cpu_s: Callable[[], Mapping[tuple[int, int], float]] = dict,
    ) -> None:
        self.latest, self._arrived_at = Sample(snapshot=Snapshot(taken_at=None, host=Host())), float("-inf")
        self.watched: frozenset[str] = frozenset()
        self.host_every_s: float | None = None
        self._is_reading_arriving = self._is_closed = False
        self._sampler, self._clock, self._on_sample, self._on_memory = sampler, clock, on_sample, on_memory
        self._measure_ram, self._measure_cpu_s = measure_ram, measure_cpu_s
        self._is_woken, self._loop = threading.Event(), asyncio.get_running_loop()
        self._pending: asyncio.Future[Sample] | None = None
        threading.Thread(target=self._run, name="gpuyard-sampling", daemon=True).start()

    def now(self) -> float:
        return self._clock.now()

    def age(self) -> float:
        """Return the seconds since the latest sample arrived. The time it took does not count: where a sample takes
        longer than it may be old, no job would ever start."""
        return self._clock.monotonic() - self._arrived_at

    def request(self) -> "asyncio.Future[Sample]":
        """Return the future of a new sample, or of the one being taken. `on_sample` is called when it arrives."""
        if self._pending is None:
            self._pending = self._loop.create_future()
            self._is_woken.set()
        return self._pending

    def watch(self, devices: frozenset[str], host_every_s: float | None) -> None:
        """Set what is read between samples."""
        before_s = self._pause_s()
        self.watched, self.host_every_s = devices, host_every_s
        pause_s = self._pause_s()
        if pause_s is not None and (before_s is None or pause_s < before_s):
            self._is_woken.set()

    async def fresh(self, within_s: float) -> Sample:
        """Return the latest sample if it is at most `within_s` old, else a new one."""
        return self.latest if self.age() <= within_s else await asyncio.shield(self.request())

    def close(self) -> None:
        self._is_closed = True
        self._is_woken.set()

    def _run(self) -> None:
        while True:
            is_woken = self._is_woken.wait(self._pause_s())
            if self._is_closed:
                return
            if not is_woken:
                self._read_memory()
                continue
            self._is_woken.clear()
            if self._pending is not None:  # else only the pause has changed
                sample = self._take_sample()
                if not self._loop.is_closed():
                    self._loop.call_soon_threadsafe(self._arrive, sample)

    def _pause_s(self) -> float | None:
        """Return when memory is read next; None: not before the next sample."""
        often_s = READ_OFTEN_EVERY_S if self.watched else None
        return min(filter(None, (often_s, self.host_every_s)), default=None)

    def _read_memory(self) -> None:
        before, watched, host_every_s = self.latest, self.watched, self.host_every_s
        if self._is_reading_arriving:  # the loop is busy
            return
        try:
            sample = self._sampler.read_memory(before, watched) if watched else before
            if host_every_s is not None:
                sample = self._sampler.read_host_memory(sample, frozenset() if sample is before else sample.reread)
            if host_every_s is not None and host_every_s < 0.2:  # only near a decision, as it costs more
                sample = replace(sample, ram_mb=self._measure_ram(0.25))
        except Exception:  # noqa: BLE001 - the outermost place of the probes: a full sample follows anyway
            _log.exception("the memory of the machine cannot be read")
            self.watched, self.host_every_s = frozenset(), None
            return
        if sample is not before and not self._loop.is_closed():
            self._is_reading_arriving = True
            self._loop.call_soon_threadsafe(self._arrive_memory, before, sample)

    def _take_sample(self) -> Sample:
        try:
            return replace(self._sampler.sample(), ram_mb=self._measure_ram(), cpu_s=self._measure_cpu_s())
        except Exception:  # noqa: BLE001 - the outermost place of the probes: without an answer the queue would stop
            _log.exception("the machine cannot be sampled")
            self._clock.sleep(1.0)  # the loop requests the next sample at once
            return self.latest

    def _arrive_memory(self, before: Sample, sample: Sample) -> None:
        self._is_reading_arriving = False
        if self.latest is before:  # else a full sample has arrived since
            self.latest = sample
            self._on_memory()

    def _arrive(self, sample: Sample) -> None:
        self.latest, self._arrived_at = sample, self._clock.monotonic()
        pending, self._pending = self._pending, None
        if pending is not None and not pending.done():
            pending.set_result(sample)
        self._on_sample()


class SampleLogs:
    """Logs of the values that the gates of batches saw, at each sample and each launch. One that cannot be written is
    reported once and retried at the next sample; no run waits for it."""

    def __init__(self) -> None:
        self._logs: dict[str, RowLog] = {}
        self._failed: set[str] = set()

    def write(self, rows: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Append each row to the log at its path."""
        for path in {path for path, _ in rows}:
            try:
                if path not in self._logs:
                    from gpuyard.probes.sample_log import RowLog  # with the first batch

                    self._logs[path] = RowLog(Path(path), COLUMNS)
                own = [row for each, row in rows if each == path]
                floats = (
                    {name: round(each, 2) for name, each in row.items() if isinstance(each, float)} for row in own
                )
                self._logs[path].write_rows([row | rounded for row, rounded in zip(own, floats, strict=True)])
                self._failed.discard(path)
            except GpuyardError as error:
                if path not in self._failed:
                    _log.warning("%s; its rows are lost until it can be written", error)
                self._failed.add(path)
