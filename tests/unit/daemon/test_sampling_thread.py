"""The thread that samples the machine: full samples on request, and the memory of watched devices in between."""

import asyncio
import threading
from collections.abc import Collection
from typing import Any, cast

from msgspec.structs import replace

from gpuyard.core.snapshot import Host, Sample, Snapshot
from gpuyard.daemon.monitor.sampling import SamplingThread
from gpuyard.probes.sampler import Sampler
from tests.fakes.clock import FakeClock

DEADLINE_S = 30.0


class CountingSampler:
    """Counts full samples, and what was asked for in between."""

    def __init__(self) -> None:
        self.samples = 0
        self.asked: list[Collection[str]] = []
        self.has_asked = threading.Event()
        self.error: Exception | None = None

    def sample(self) -> Sample:
        self.samples += 1
        return Sample(snapshot=Snapshot(taken_at=float(self.samples), host=Host()))

    def read_memory(self, sample: Sample, device_ids: Collection[str]) -> Sample:
        self.asked.append(device_ids)
        self.has_asked.set()
        if self.error is not None:
            raise self.error
        return replace(sample, reread=frozenset(device_ids))


def watch(watched: frozenset[str], readings: int, error: Exception | None = None) -> tuple[CountingSampler, Any]:
    """Take a sample, watch devices until so many readings have arrived, and take another sample."""
    sampler, arrived = CountingSampler(), []
    sampler.error = error

    async def scenario() -> Any:
        def note() -> None:
            arrived.append(sampling.latest)
            if len(arrived) >= readings:
                enough.set()

        enough = asyncio.Event()

        clock = FakeClock()
        sampling = SamplingThread(cast("Sampler", sampler), clock, lambda: None, on_memory=note)
        try:
            sampling.watched = watched
            await sampling.request()
            clock.time += 7.0
            async with asyncio.timeout(DEADLINE_S):
                await (enough.wait() if readings else asyncio.to_thread(sampler.has_asked.wait, DEADLINE_S))
            assert sampling.age() == 7.0, "a reading of memory makes the sample no younger"
            async with asyncio.timeout(DEADLINE_S):
                await sampling.request()
            return sampling.latest
        finally:
            sampling.close()

    latest = asyncio.run(scenario())
    assert all(each.reread == watched for each in arrived)
    return sampler, latest


def test_the_memory_of_watched_devices_is_read_between_samples() -> None:
    sampler, latest = watch(frozenset({"G0"}), readings=3)
    assert set(sampler.asked) == {frozenset({"G0"})}
    assert (sampler.samples, latest.reread) == (2, frozenset())


def test_a_failing_reading_does_not_end_the_thread() -> None:
    sampler, _ = watch(frozenset({"G0"}), readings=0, error=RuntimeError("a bug"))
    assert (sampler.samples, len(sampler.asked)) == (2, 1), "it was not repeated before the next step"
