"""The route `/metrics`: counts events as they happen and writes them in the Prometheus text format, version 0.0.4.

Counting follows every step, up to a thousand times a second with short jobs, so it only adds. Units are those of
Prometheus: bytes, seconds, ratios. An unknown value is left out rather than written as zero.
"""

import asyncio
import contextlib
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from gpuyard.daemon.api.jobs import SAMPLE_FOR_PEOPLE_S
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.monitor.devices import DeviceList, disk_rows
from gpuyard.daemon.server.http_messages import Response
from gpuyard.errors import EnvironmentFault
from gpuyard.model.energy import EnergyPrice, EnergyUse
from gpuyard.model.job import OutcomeKind, PublishedEventKind
from gpuyard.model.lifecycle import FINISHED, JobState
from gpuyard.model.machine_snapshot import Device, Host, Snapshot
from gpuyard.model.out_of_memory import ShortageKind
from gpuyard.model.units import MB
from gpuyard.policy.device_health import HealthIssue, first_faults
from gpuyard.policy.device_state import MemoryParts
from gpuyard.policy.host_room import HostReserved
from gpuyard.policy.machine import would_have_run_out
from gpuyard.policy.world import Plan
from gpuyard.queue.step import Step
from gpuyard.schema.machine import DiskRow
from gpuyard.version import __version__

_LONG_S = (
    0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 180.0, 600.0, 1800.0, 3600.0, 10800.0, 28800.0, 86400.0, 259200.0, 604800.0,
)  # fmt: skip
_SHORT_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_VALUE_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})
Labels = Mapping[str, str]
Samples = Iterable[tuple[Labels, float | None]]


class Metrics:
    def __init__(self, scheduler: SchedulerLoop, devices: DeviceList, started_at: float) -> None:
        self._scheduler, self._devices, self._started_at = scheduler, devices, started_at
        self._counters = EventCounters()
        scheduler.listeners.append(self._count)

    def _count(self, step: Step) -> None:
        scheduler, snapshot = self._scheduler, self._scheduler.sampling.latest.snapshot
        self._counters.count(step, scheduler.step_s or 0.0, scheduler.controller.plan, snapshot)

    async def metrics(self) -> Response:
        scheduler, controller, store = self._scheduler, self._scheduler.controller, self._scheduler.store
        sample = await scheduler.sampling.fresh(SAMPLE_FOR_PEOPLE_S)
        breakdowns, leases, reserved = dict[str, MemoryParts](), dict[str, int](), None
        # If the ledger is not read in time, the other metrics are still useful; `/devices` says why.
        with contextlib.suppress(EnvironmentFault, TimeoutError):
            users = await asyncio.wait_for(self._devices.users(), 2.0)
            own, reserved = sum(lease.id in users.jobs for lease in users.leases), users.host_reserved
            leases = {"own": own, "others": len(users.leases) - own}
            breakdowns = {device.id: users.breakdown(device) for device in users.snapshot.devices}
        scrape = Scrape(
            started_at=scheduler.clock.to_wall(self._started_at),
            is_paused=bool(store.setting("paused")),
            counts=store.counts(),
            snapshot=sample.snapshot,
            breakdowns=breakdowns,
            leases=leases,
            counters=self._counters,
            issues=self._devices.health.issues(sample.snapshot, scheduler.ledger.health_marks),
            reserved=reserved,
            guard_suspensions=controller.memory_guard.suspended,
            disks=disk_rows(scheduler),
            energy=controller.energy_meter.total,
            energy_price=controller.rules.energy_price,
        )
        return Response(body=write_metrics(scrape), content_type="text/plain; version=0.0.4; charset=utf-8")


class Histogram:
    """Counts per bucket: values up to each bound, then those above the last one. `total` is the sum of all values."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class EventCounters:
    """Every label starts at zero: Prometheus would miss the first event of a series that appears with it."""

    def __init__(self) -> None:
        self.starts = 0
        self.attempts_ended = dict.fromkeys(sorted(set(OutcomeKind) - {OutcomeKind.NEVER_STARTED}), 0)
        self.jobs_finished = dict.fromkeys((state for state in JobState if state in FINISHED), 0)
        self.out_of_memory = dict.fromkeys(ShortageKind, 0)
        self.out_of_memory_avoided = 0
        self.wait_s, self.run_s, self.step_s = Histogram(_LONG_S), Histogram(_LONG_S), Histogram(_SHORT_S)
        self._snapshot: Snapshot | None = None
        self._avoided, self._examined = set[int](), set[int]()

    def count(self, step: Step, step_s: float, plan: Plan, snapshot: Snapshot) -> None:
        """Count the events of a step that took `step_s`, and the jobs that its plan keeps waiting."""
        self.step_s.add(step_s)
        for event in step.events:
            if event.kind is PublishedEventKind.STARTED:
                self.starts += 1
                queued_at = event.job.submitted_at if event.job.queued_at is None else event.job.queued_at
                self.wait_s.add(max(0.0, event.at - queued_at))
            elif event.kind is PublishedEventKind.ENDED and event.outcome is not None and event.attempt is not None:
                self.attempts_ended[event.outcome.kind] += 1
                if event.attempt.started is not None:
                    self.run_s.add(event.attempt.ran_s(event.at))
                if event.attempt.lack is not None:
                    self.out_of_memory[event.attempt.lack.shortage.where] += 1
            else:
                self.jobs_finished[event.job.state] += event.jobs
                self._avoided.discard(event.job.id)
        # Count each job once. A job waits for many steps, so it is examined once per snapshot.
        if snapshot is not self._snapshot:
            self._snapshot = snapshot
            self._examined.clear()
        for waiting in plan.waiting:
            if waiting.job_id not in self._examined and waiting.job_id not in self._avoided:
                self._examined.add(waiting.job_id)
                if would_have_run_out(waiting.need, waiting.reasons, snapshot):
                    self._avoided.add(waiting.job_id)
                    self.out_of_memory_avoided += 1


class Scrape(Struct, frozen=True, kw_only=True):
    """All values of one response. `breakdowns` are by device id, `leases` by `own` and `others`."""

    started_at: float
    is_paused: bool
    counts: Mapping[JobState, int]
    snapshot: Snapshot
    breakdowns: Mapping[str, MemoryParts]
    leases: Mapping[str, int]
    counters: EventCounters
    guard_suspensions: int = 0
    issues: Mapping[str, Sequence[HealthIssue]] = {}
    disks: Sequence[DiskRow] = ()
    energy: EnergyUse = EnergyUse()
    energy_price: EnergyPrice = EnergyPrice()
    reserved: HostReserved | None = None


def write_metrics(scrape: Scrape) -> bytes:
    counters = scrape.counters
    started = "When the daemon started, in seconds since the epoch."
    leases = "Live leases: of this queue, and of others (scripts, `gpuyard run`, other users)."
    ended, finished = _by("outcome", counters.attempts_ended), _by("state", counters.jobs_finished)
    lacked = "Attempts that ran out of memory, by where."
    avoided = "Jobs kept waiting while enough memory for them was free, but promised to others by leases."
    guarded = "Jobs suspended because their GPU was about to run out of memory."
    lines = itertools.chain(
        _metric("build_info", "gauge", "Version of the daemon.", [({"version": __version__}, 1)]),
        _metric("daemon_start_time_seconds", "gauge", started, [({}, scrape.started_at)]),
        _metric("queue_paused", "gauge", "1 while the queue is paused.", [({}, scrape.is_paused)]),
        _metric("jobs", "gauge", "Jobs in this state now.", _by("state", scrape.counts)),
        _metric("leases", "gauge", leases, _by("whose", scrape.leases)),
        _devices(scrape),
        _metric(
            "device_issue",
            "gauge",
            "1 for each fault or alarm of a device.",
            [
                ({"device": device.id, "kind": issue.kind, "severity": issue.severity}, 1)
                for device in scrape.snapshot.devices
                for issue in scrape.issues.get(device.id, ())
            ],
        ),
        *(
            _metric(f"host_{name}", "gauge", text, [({}, read(scrape.snapshot.host))])
            for name, text, read in _HOST_METRICS
        ),
        *(
            _metric(f"host_{name}", "gauge", text, [({}, None if scrape.reserved is None else read(scrape.reserved))])
            for name, text, read in _RESERVED_METRICS
        ),
        _disks(scrape.disks),
        _metric("starts_total", "counter", "Attempts that started.", [({}, counters.starts)]),
        _metric("attempts_ended_total", "counter", "Attempts that ended, by outcome.", ended),
        _metric("jobs_finished_total", "counter", "Jobs that finished, by final state.", finished),
        _metric("out_of_memory_total", "counter", lacked, _by("where", counters.out_of_memory)),
        _metric("out_of_memory_avoided_total", "counter", avoided, [({}, counters.out_of_memory_avoided)]),
        _metric("memory_guard_suspensions_total", "counter", guarded, [({}, scrape.guard_suspensions)]),
        _energy(scrape.energy, scrape.energy_price),
        _histogram("wait_seconds", "From when a job was queued to its start.", counters.wait_s),
        _histogram("run_seconds", "How long attempts ran, without the time suspended.", counters.run_s),
        _histogram("step_seconds", "Duration of a step of the scheduler.", counters.step_s),
    )
    return "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")


def _is_throttled(device: Device) -> bool | None:
    return None if device.health is None or device.health.throttle is None else bool(device.health.throttle)


_DEVICE_METRICS: tuple[tuple[str, str, Callable[[Device], float | None]], ...] = (
    ("memory_total_bytes", "Memory of the device.", lambda device: _bytes(device.memory_total_mb)),
    ("memory_used_bytes", "Memory in use by any process.", lambda device: _bytes(device.memory_used_mb)),
    ("utilization_ratio", "Utilization, from 0 to 1.", lambda device: _ratio(device.utilization_percent)),
    ("power_watts", "Power draw.", lambda device: device.power_draw_w),
    ("power_limit_watts", "Power limit.", lambda device: device.power_limit_w),
    ("energy_joules", "Energy since the driver was loaded, by the device's counter.", lambda device: device.energy_j),
    ("temperature_celsius", "Temperature.", lambda device: device.temperature_c),
    (
        "ecc_uncorrected_errors",
        "Uncorrected ECC errors since the driver was loaded.",
        lambda device: device.health.ecc_uncorrected if device.health else None,
    ),
    ("throttled", "1 while heat or the power brake slows the device.", _is_throttled),
)
_HEALTHY = "0 if the device is unusable: it has a fault or has vanished."
_CHARGED = "reserved, or used where that is more"
_BREAKDOWN_METRICS: tuple[tuple[str, str, Callable[[MemoryParts], float | None]], ...] = (
    ("memory_own_bytes", f"Memory of this queue's jobs: {_CHARGED}.", lambda parts: _bytes(parts.own_mb)),
    ("memory_own_used_bytes", "Memory that this queue's jobs use.", lambda parts: _bytes(parts.own_used_mb)),
    ("memory_others_bytes", f"Memory of other leases: {_CHARGED}.", lambda parts: _bytes(parts.others_mb)),
    ("memory_others_used_bytes", "Memory that other leases use.", lambda parts: _bytes(parts.others_used_mb)),
    ("memory_foreign_bytes", "Memory that processes without a lease use.", lambda parts: _bytes(parts.foreign_mb)),
    ("memory_free_bytes", "Memory that is neither used nor reserved.", lambda parts: _bytes(parts.free_mb)),
)
_HOST_METRICS: tuple[tuple[str, str, Callable[[Host], float | None]], ...] = (
    ("cpu_ratio", "CPU utilization of the machine, from 0 to 1.", lambda host: _ratio(host.cpu_percent)),
    ("memory_total_bytes", "RAM of the machine, or of its container.", lambda host: _bytes(host.memory_total_mb)),
    ("memory_available_bytes", "RAM available to programs.", lambda host: _bytes(host.memory_available_mb)),
)
_RESERVED_METRICS: tuple[tuple[str, str, Callable[[HostReserved], float | None]], ...] = (
    ("memory_reserved_bytes", "RAM that leases reserve.", lambda reserved: _bytes(reserved.ram_mb)),
    ("memory_kept_free_bytes", "RAM that no lease may reserve.", lambda reserved: _bytes(reserved.floor_mb)),
    ("cpus_reserved", "CPUs that leases reserve.", lambda reserved: reserved.cpus),
)


def _devices(scrape: "Scrape") -> Iterator[str]:
    labels: dict[str, Labels] = {}
    snapshot, faulty, devices = scrape.snapshot, first_faults(scrape.issues), scrape.snapshot.devices
    for device in devices:
        own = "" if device.index is None else str(device.index)
        index = snapshot.labels.get(device.id, "") if snapshot.is_mixed else own
        labels[device.id] = {"device": device.id, "index": index, "name": device.name or "", "vendor": device.vendor}
    for name, text, read in _DEVICE_METRICS:
        yield from _metric(f"device_{name}", "gauge", text, [(labels[each.id], read(each)) for each in devices])
    healthy = [(labels[each.id], each.healthy and each.id not in faulty) for each in devices]
    yield from _metric("device_healthy", "gauge", _HEALTHY, healthy)
    known = [(labels[device_id], parts) for device_id, parts in scrape.breakdowns.items() if device_id in labels]
    for name, text, read_part in _BREAKDOWN_METRICS:
        yield from _metric(f"device_{name}", "gauge", text, [(each, read_part(parts)) for each, parts in known])


def _disks(disks: Sequence[DiskRow]) -> Iterator[str]:
    labels = [{"folder": disk.folder, "what": disk.what} for disk in disks]
    for name, text in (
        ("free", "Free space of a disk that the queue or its jobs write to."),
        ("total", "Size of that disk."),
        ("min_free", "No job starts with less free space there."),
    ):
        figures = (_bytes(getattr(disk, f"{name}_mb")) for disk in disks)
        yield from _metric(f"disk_{name}_bytes", "gauge", text, zip(labels, figures, strict=True))


def _energy(use: EnergyUse, price: EnergyPrice) -> Iterator[str]:
    joules = "Energy that GPUs used for this queue's jobs since the daemon started."
    seconds = "GPU-seconds that jobs held, by whether they kept the GPU busy."
    spent = [({"use": "busy"}, use.seconds - use.idle_s), ({"use": "idle"}, use.idle_s)]
    cost = "What that energy costs at [energy] price."
    co2e = "CO2e of that energy at [energy] gco2_per_kwh."
    yield from _metric("energy_joules_total", "counter", joules, [({}, use.joules)])
    yield from _metric("energy_gpu_seconds_total", "counter", seconds, spent)
    yield from _metric("energy_cost_total", "counter", cost, [({"currency": price.currency}, price.cost(use.joules))])
    yield from _metric("energy_co2e_grams_total", "counter", co2e, [({}, price.co2e_g(use.joules))])


def _histogram(name: str, text: str, histogram: Histogram) -> Iterator[str]:
    yield from _head(name, "histogram", text)
    bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
    for bound, count in zip(bounds, itertools.accumulate(histogram.counts), strict=True):
        yield _sample(f"{name}_bucket", {"le": bound}, count)
    yield _sample(f"{name}_count", {}, sum(histogram.counts))
    yield _sample(f"{name}_sum", {}, histogram.total)


def _metric(name: str, kind: str, text: str, samples: Samples) -> Iterator[str]:
    known = [(labels, value) for labels, value in samples if value is not None]
    if known:
        yield from _head(name, kind, text)
    for labels, value in known:
        yield _sample(name, labels, value)


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP gpuyard_{name} {text}"
    yield f"# TYPE gpuyard_{name} {kind}"


def _sample(name: str, labels: Labels, value: float) -> str:
    pairs = ",".join(f'{label}="{text.translate(_VALUE_ESCAPES)}"' for label, text in labels.items())
    return f"gpuyard_{name}{{{pairs}}} {_number(value)}" if pairs else f"gpuyard_{name} {_number(value)}"


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _by(label: str, counts: Mapping[Any, int]) -> Samples:
    return [({label: str(key)}, count) for key, count in counts.items()]


def _bytes(memory_mb: float | None) -> float | None:
    return None if memory_mb is None else memory_mb * MB


def _ratio(percent: float | None) -> float | None:
    return None if percent is None else percent / 100
