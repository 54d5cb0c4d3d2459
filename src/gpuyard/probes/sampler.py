"""Sample the machine over time: raw and smoothed figures, as often as the most demanding consumer asks.

A consumer asks for an interval with `want`, for the duration of a block. The shortest interval counts, and without a
consumer no sample is due. The sampler has no thread: its owner calls `due_in` and `sample`."""

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from gpuyard.model.machine_snapshot import HOST_RAM, Problem, Sample, Snapshot, find_new_problems
from gpuyard.policy.foreign_load import Smoothed, smooth

if TYPE_CHECKING:
    from gpuyard.ports import Clock


class SnapshotSource(Protocol):
    def snapshot(self) -> Snapshot: ...

    def read_memory(self, snapshot: Snapshot, device_ids: Collection[str]) -> Snapshot: ...

    def read_host_memory(self, snapshot: Snapshot) -> Snapshot: ...


class Sampler:
    def __init__(
        self, machine: SnapshotSource, clock: "Clock", *, sink: Callable[[Sample], None] | None = None
    ) -> None:
        self._machine = machine
        self._clock = clock
        self._sink = sink
        self._wanted: dict[object, float] = {}
        self._averages: dict[tuple[str, str], Smoothed] = {}
        self._problems: tuple[Problem, ...] = ()
        self._last_started: float | None = None

    @contextlib.contextmanager
    def want(self, interval_s: float) -> Iterator[None]:
        """Ask for a sample at least every `interval_s` until the block ends."""
        demand = object()
        self._wanted[demand] = max(0.05, interval_s)
        try:
            yield
        finally:
            del self._wanted[demand]

    @property
    def interval_s(self) -> float | None:
        return min(self._wanted.values(), default=None)

    def due_in(self) -> float | None:
        """Return the seconds until the next sample is due, or None while no consumer asks for samples."""
        interval = self.interval_s
        if interval is None:
            return None
        if self._last_started is None:
            return 0.0
        return max(0.0, self._last_started + interval - self._clock.monotonic())

    def read_memory(self, sample: Sample, device_ids: Collection[str]) -> Sample:
        """Return an earlier sample with the present memory of these devices; the identical one if none could be read at
        little cost. Smoothed figures stay: load and power are not read."""
        before = sample.snapshot
        snapshot = self._machine.read_memory(before, device_ids)
        if snapshot is before:
            return sample
        pairs = zip(before.devices, snapshot.devices, strict=True)
        reread = frozenset(now.id for then, now in pairs if now is not then)
        return replace(sample, snapshot=snapshot, reread=reread, new_problems=())

    def read_host_memory(self, sample: Sample, reread: frozenset[str]) -> Sample:
        """Return a sample with the present RAM of the host. `reread` are the devices that were read just now."""
        snapshot = self._machine.read_host_memory(sample.snapshot)
        return replace(sample, snapshot=snapshot, reread=reread | {HOST_RAM}, new_problems=())

    def sample(self) -> Sample:
        """Take a sample now, whether it is due or not."""
        now = self._last_started = self._clock.monotonic()
        snapshot = self._machine.snapshot()
        raw = {("cpu", ""): snapshot.host.cpu_percent}
        for device in snapshot.devices:
            raw["load", device.id], raw["power", device.id] = device.utilization_percent, device.power_draw_w
        self._averages = averages = {
            key: smooth(self._averages.get(key, Smoothed()), value, now, half_life_s=5.0) for key, value in raw.items()
        }
        new_problems = find_new_problems(self._problems, snapshot.problems)
        self._problems = snapshot.problems
        sample = Sample(
            snapshot=snapshot,
            cpu_percent=averages["cpu", ""].value,
            loads={device.id: averages["load", device.id].value for device in snapshot.devices},
            powers_w={device.id: averages["power", device.id].value for device in snapshot.devices},
            new_problems=new_problems,
        )
        if self._sink is not None:
            self._sink(sample)
        return sample
