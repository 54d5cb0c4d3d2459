"""What `/metrics` says, in Prometheus' text format. Nothing but this module imports prometheus-client.

Units are Prometheus' own: bytes, seconds, ratios. What is unknown is left out: it is not zero.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

from msgspec import Struct
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.memory.device_breakdown import Breakdown
from gpuyard.core.snapshot import Device, Host, Snapshot
from gpuyard.daemon.metrics.counters import EventCounters, Histogram
from gpuyard.version import __version__

_MB = 1_048_576
_DEVICE_LABELS = ("device", "index", "name", "vendor")


class Scrape(Struct, frozen=True, kw_only=True):
    """All that is told at one moment. `parts` are by device id, `leases` by whose they are."""

    started_at: float
    is_paused: bool
    counts: Mapping[JobState, int]
    snapshot: Snapshot
    parts: Mapping[str, Breakdown]
    leases: Mapping[str, int]
    tally: EventCounters


def expose(scrape: Scrape) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Collector(scrape))
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(self, scrape: Scrape) -> None:
        self._scrape = scrape

    def collect(self) -> Iterator[Metric]:
        yield from _daemon(self._scrape)
        yield from _devices(self._scrape.snapshot.devices, self._scrape.parts)
        yield from _host(self._scrape.snapshot.host)
        yield from _counters(self._scrape.tally)
        yield from _histograms(self._scrape.tally)


def _daemon(scrape: Scrape) -> Iterator[Metric]:
    yield InfoMetricFamily("gpuyard_build", "The daemon's version.", value={"version": __version__})
    yield _gauge("daemon_start_time_seconds", "When the daemon started, since the epoch.", scrape.started_at)
    yield _gauge("queue_paused", "1 while the queue is paused: nothing starts.", float(scrape.is_paused))
    yield _gauges("jobs", "Jobs of the queue that are in this state now.", "state", scrape.counts.items())
    text = "Live leases: this queue's own, and others' (scripts, `gpuyard run`, other users)."
    yield _gauges("leases", text, "whose", scrape.leases.items())


# Devices and the host

_OF_DEVICE: tuple[tuple[str, str, Callable[[Device], float | None]], ...] = (
    ("memory_total_bytes", "Memory of the device.", lambda device: _bytes(device.memory_total_mb)),
    (
        "memory_used_bytes",
        "Memory that is in use on it, whoever uses it.",
        lambda device: _bytes(device.memory_used_mb),
    ),
    ("utilization_ratio", "How busy it is, from 0 to 1.", lambda device: _ratio(device.utilization_percent)),
    ("power_watts", "What it draws.", lambda device: device.power_draw_w),
    ("power_limit_watts", "The most that it may draw.", lambda device: device.power_limit_w),
    ("temperature_celsius", "How hot it is.", lambda device: device.temperature_c),
    ("healthy", "0 where it cannot be used: it has a fault, or has vanished.", lambda device: float(device.healthy)),
)
_OF_PARTS: tuple[tuple[str, str, Callable[[Breakdown], float | None]], ...] = (
    (
        "memory_own_bytes",
        "Memory that this queue's jobs have of it: reserved, or used where that is more.",
        lambda parts: _bytes(parts.own.charged_mb),
    ),
    ("memory_own_used_bytes", "Memory that this queue's jobs use on it.", lambda parts: _bytes(parts.own.used_mb)),
    (
        "memory_others_bytes",
        "Memory that other leases have of it: reserved, or used where that is more.",
        lambda parts: _bytes(parts.others.charged_mb),
    ),
    ("memory_others_used_bytes", "Memory that other leases use on it.", lambda parts: _bytes(parts.others.used_mb)),
    (
        "memory_foreign_bytes",
        "Memory that processes without a lease use on it.",
        lambda parts: _bytes(parts.foreign_mb),
    ),
    ("memory_free_bytes", "Memory that is neither used nor reserved.", lambda parts: _bytes(parts.free_mb)),
)
_OF_HOST: tuple[tuple[str, str, Callable[[Host], float | None]], ...] = (
    ("cpu_ratio", "How busy the machine's processors are, from 0 to 1.", lambda host: _ratio(host.cpu_percent)),
    ("memory_total_bytes", "RAM of the machine, or of its container.", lambda host: _bytes(host.memory_total_mb)),
    ("memory_available_bytes", "RAM that programs could still take.", lambda host: _bytes(host.memory_available_mb)),
)


def _devices(devices: Iterable[Device], parts: Mapping[str, Breakdown]) -> Iterator[Metric]:
    for name, text, read in _OF_DEVICE:
        yield _by_device(name, text, ((device, read(device)) for device in devices))
    known = [(device, parts[device.id]) for device in devices if device.id in parts]
    for name, text, read_part in _OF_PARTS:
        yield _by_device(name, text, ((device, read_part(part)) for device, part in known))


def _by_device(name: str, text: str, values: Iterable[tuple[Device, float | None]]) -> Metric:
    family = GaugeMetricFamily(f"gpuyard_device_{name}", text, labels=_DEVICE_LABELS)
    for device, value in values:
        if value is not None:
            family.add_metric(_labels(device), value)
    return family


def _labels(device: Device) -> list[str]:
    index = "" if device.index is None else str(device.index)
    return [device.id, index, device.name or "", device.vendor]


def _host(host: Host) -> Iterator[Metric]:
    for name, text, read in _OF_HOST:
        value = read(host)
        if value is not None:
            yield _gauge(f"host_{name}", text, value)


# What has happened


def _counters(tally: EventCounters) -> Iterator[Metric]:
    yield CounterMetricFamily("gpuyard_starts", "Attempts that started.", value=tally.starts)
    yield _counter("attempts_ended", "Attempts that ended, by how.", "outcome", tally.attempts_ended.items())
    yield _counter(
        "jobs_finished", "Jobs of which nothing more will come, by how.", "state", tally.jobs_finished.items()
    )
    yield _counter("out_of_memory", "Attempts that ran out of memory, by whose.", "where", tally.out_of_memory.items())
    yield CounterMetricFamily(
        "gpuyard_out_of_memory_avoided",
        "Jobs that were kept waiting while enough memory for them was free and promised to others by leases.",
        value=tally.out_of_memory_avoided,
    )


def _histograms(tally: EventCounters) -> Iterator[Metric]:
    yield _histogram("wait_seconds", "From when a job was queued to its start.", tally.wait_s)
    yield _histogram(
        "run_seconds", "How long attempts ran; time in which they were suspended is left out.", tally.run_s
    )
    yield _histogram("step_seconds", "What a step of the scheduler took.", tally.step_s)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"gpuyard_{name}", text, value=value)


def _gauges(name: str, text: str, label: str, counts: Iterable[tuple[str, int]]) -> Metric:
    family = GaugeMetricFamily(f"gpuyard_{name}", text, labels=[label])
    for word, count in counts:
        family.add_metric([word], count)
    return family


def _counter(name: str, text: str, label: str, counts: Iterable[tuple[str, int]]) -> Metric:
    family = CounterMetricFamily(f"gpuyard_{name}", text, labels=[label])
    for word, count in counts:
        family.add_metric([word], count)
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
    buckets = list(zip(bounds, itertools.accumulate(map(float, histogram.counts)), strict=True))
    return HistogramMetricFamily(f"gpuyard_{name}", text, buckets=buckets, sum_value=histogram.total)


def _bytes(megabytes: float | None) -> float | None:
    return None if megabytes is None else megabytes * _MB


def _ratio(percent: float | None) -> float | None:
    return None if percent is None else percent / 100.0
