from collections.abc import Collection

import pytest
from msgspec.structs import replace

from gpuyard.model.machine_snapshot import HOST_RAM, Device, Host, Problem, Sample, Snapshot, Vendor
from gpuyard.probes.sampler import Sampler
from tests.fakes.clock import FakeClock

TROUBLE = Problem(source="smi", kind="timeout", message="no answer")


class ScriptedMachine:
    """A machine with one device at the given loads in turn."""

    def __init__(self, *loads: float | None, problems: tuple[Problem, ...] = ()) -> None:
        self._loads = list(loads)
        self.problems = problems

    def read_memory(self, snapshot: Snapshot, device_ids: Collection[str]) -> Snapshot:
        devices = (replace(each, memory_used_mb=9.0) if each.id in device_ids else each for each in snapshot.devices)
        return replace(snapshot, devices=tuple(devices)) if device_ids else snapshot

    def read_host_memory(self, snapshot: Snapshot) -> Snapshot:
        return replace(snapshot, host=replace(snapshot.host, memory_available_mb=5.0))

    def snapshot(self) -> Snapshot:
        device = Device(id="GPU-a", vendor=Vendor.NVIDIA, utilization_percent=self._loads.pop(0), power_draw_w=100.0)
        return Snapshot(taken_at=0.0, host=Host(cpu_percent=50.0), devices=(device,), problems=self.problems)


def test_a_reading_of_memory_changes_no_smoothed_figure() -> None:
    sampler = Sampler(ScriptedMachine(40.0), FakeClock())
    before = sampler.sample()
    after = sampler.read_memory(before, {"GPU-a"})
    assert (after.loads, after.powers_w, after.reread) == (before.loads, before.powers_w, frozenset({"GPU-a"}))
    assert after.snapshot.devices[0].memory_used_mb == 9.0
    assert sampler.read_memory(before, set()) is before
    after = sampler.read_host_memory(before, frozenset({"GPU-a"}))
    assert after.reread == {"GPU-a", HOST_RAM}
    assert (after.snapshot.host.memory_available_mb, after.snapshot.host.cpu_percent) == (5.0, 50.0)
    assert after.loads == before.loads


class Collected:
    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def write(self, sample: Sample) -> None:
        self.samples.append(sample)


def test_the_shortest_requested_interval_applies() -> None:
    sampler = Sampler(ScriptedMachine(), FakeClock())
    assert sampler.due_in() is None
    with sampler.want(1.0):
        assert sampler.due_in() == 0.0
    assert sampler.due_in() is None
    clock = FakeClock()
    sampler = Sampler(ScriptedMachine(0.0), clock)
    with sampler.want(10.0):
        sampler.sample()
        assert sampler.due_in() == pytest.approx(10.0)
        with sampler.want(0.5):
            assert sampler.interval_s == 0.5
            clock.time += 0.2
            assert sampler.due_in() == pytest.approx(0.3)
        clock.time += 100
        assert sampler.due_in() == 0.0
    sampler = Sampler(ScriptedMachine(), FakeClock())
    with sampler.want(0.0):
        assert sampler.interval_s is not None
        assert sampler.interval_s > 0


def test_a_sample_has_raw_and_smoothed_figures_and_goes_to_the_log() -> None:
    clock = FakeClock()
    sampler = Sampler(ScriptedMachine(0.0, 100.0), clock)
    sampler.sample()
    clock.time += 5.0
    sample = sampler.sample()
    assert sample.snapshot.devices[0].utilization_percent == 100.0
    assert sample.loads["GPU-a"] == pytest.approx(50.0)
    assert sample.powers_w["GPU-a"] == pytest.approx(100.0)
    assert sample.cpu_percent == pytest.approx(50.0)
    assert Sampler(ScriptedMachine(None), FakeClock()).sample().loads["GPU-a"] is None
    log = Collected()
    sampler = Sampler(ScriptedMachine(1.0, 2.0), FakeClock(), sink=log.write)
    taken = [sampler.sample(), sampler.sample()]
    assert log.samples == taken


def test_a_problem_is_reported_once_and_again_after_it_was_solved() -> None:
    machine = ScriptedMachine(0.0, 0.0, 0.0, 0.0, problems=(TROUBLE,))
    sampler = Sampler(machine, FakeClock())
    assert sampler.sample().new_problems == (TROUBLE,)
    assert sampler.sample().new_problems == ()
    machine.problems = ()
    assert sampler.sample().new_problems == ()
    machine.problems = (TROUBLE,)
    assert sampler.sample().new_problems == (TROUBLE,)
