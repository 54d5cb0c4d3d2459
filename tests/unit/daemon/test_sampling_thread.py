"""The thread that samples the machine: full samples on request, and the memory of watched devices in between."""

import asyncio
import threading
from collections.abc import Collection
from typing import Any, cast

import pytest
from msgspec.structs import replace

from gpuyard.daemon.monitor.sampling import SamplingThread
from gpuyard.model.machine_snapshot import HOST_RAM, Host, Sample, Snapshot
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

    def read_host_memory(self, sample: Sample, reread: frozenset[str]) -> Sample:
        self.asked.append((HOST_RAM,))
        return replace(sample, reread=reread | {HOST_RAM})


def watch(
    watched: frozenset[str], readings: int, error: Exception | None = None, host_every_s: float | None = None
) -> tuple[CountingSampler, Any]:
    """Take a sample, watch devices until so many readings have arrived, and take another sample."""
    sampler, arrived = CountingSampler(), []
    sampler.error = error

    def measure(max_age_s: float | None = None) -> dict[tuple[int, int], float]:
        return {(1, 1): 0.0 if max_age_s is None else 512.0}

    async def scenario() -> Any:
        def note() -> None:
            arrived.append(sampling.latest)
            if len(arrived) >= readings:
                enough.set()

        enough = asyncio.Event()

        clock = FakeClock()
        sampling = SamplingThread(cast("Sampler", sampler), clock, lambda: None, measure, on_memory=note)
        try:
            sampling.watch(watched, host_every_s)
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
    expected = watched if host_every_s is None else watched | {HOST_RAM}
    assert all(each.reread == expected for each in arrived)
    measured = 512.0 if host_every_s is not None and host_every_s < 0.2 else 0.0
    assert all(each.ram_mb == {(1, 1): measured} for each in arrived)
    return sampler, latest


def test_the_memory_of_watched_devices_is_read_between_samples() -> None:
    sampler, latest = watch(frozenset({"G0"}), readings=3)
    assert set(sampler.asked) == {frozenset({"G0"})}
    assert (sampler.samples, latest.reread) == (2, frozenset())


def test_a_failing_reading_does_not_end_the_thread() -> None:
    sampler, _ = watch(frozenset({"G0"}), readings=0, error=RuntimeError("a bug"))
    assert (sampler.samples, len(sampler.asked)) == (2, 1), "it was not repeated before the next step"


@pytest.mark.parametrize("measures_jobs", [False, True])
@pytest.mark.parametrize("watched", [frozenset[str](), frozenset({"G0"})])
def test_ram_is_read_between_samples_as_often_as_the_watch_says(
    watched: frozenset[str], *, measures_jobs: bool
) -> None:
    sampler, latest = watch(watched, readings=3, host_every_s=0.05 if measures_jobs else 0.2)
    assert (HOST_RAM,) in sampler.asked
    assert (watched in sampler.asked) is bool(watched)
    assert latest.reread == frozenset()
