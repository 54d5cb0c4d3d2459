import threading
from collections.abc import Iterator, Sequence

import pytest
from msgspec.structs import replace

from gpuyard.errors import ProbeCrashed
from gpuyard.model.machine_snapshot import Device, Host, Problem, Reading, Vendor
from gpuyard.probes.fallback_chain import FallbackChain
from gpuyard.probes.machine_reader import MachineReader, assemble
from tests.fakes.clock import FakeClock

HOST = Host(name="box", cpu_percent=5.0)


class FixedHost:
    def read(self) -> Host:
        return HOST

    def read_memory(self, host: Host) -> Host:
        return replace(host, memory_available_mb=7.0)


class SlowTool:
    """A command-line probe that ignores its timeout."""

    name = "slow"
    vendor = Vendor.AMD
    may_hang = False

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def read(self, timeout_s: float) -> Reading:
        self.let_go.wait(60)
        return Reading(devices=(Device(id="slow-0", vendor=Vendor.AMD),))


class FixedProbe:
    name = "fixed"
    may_hang = False

    def __init__(self, vendor: Vendor) -> None:
        self.vendor = vendor
        self.reading = Reading(devices=(Device(id=f"{vendor}-0", vendor=vendor),))

    def read(self, timeout_s: float) -> Reading:
        return self.reading


@pytest.fixture
def slow() -> Iterator[SlowTool]:
    probe = SlowTool()
    yield probe
    probe.let_go.set()


class QuickProbe(FixedProbe):
    """Reads the memory of its device at little cost."""

    may_hang = True

    def read_memory(self, devices: Sequence[Device]) -> list[Device]:
        return [replace(device, memory_used_mb=700.0) for device in devices]


def test_the_memory_of_devices_or_of_the_host_is_read_into_an_earlier_snapshot() -> None:
    clock = FakeClock()
    probes = (QuickProbe(Vendor.NVIDIA), QuickProbe(Vendor.AMD), FixedProbe(Vendor.INTEL))
    reader = MachineReader([FallbackChain(p.vendor, [p], clock) for p in probes], FixedHost(), clock, 5)
    before = reader.snapshot()
    clock.time += 5.0
    after = reader.read_memory(before, {"nvidia-0", "intel-0"})
    assert [device.memory_used_mb for device in after.devices] == [700.0, None, None]
    assert after.devices[1:] == before.devices[1:]
    assert all(now is then for now, then in zip(after.devices[1:], before.devices[1:], strict=True))
    assert after.taken_at == before.taken_at, "the other figures are as old as before"
    assert reader.read_memory(before, {"intel-0"}) is before
    reader = MachineReader([], FixedHost(), FakeClock(), 5.0)
    before = reader.snapshot()
    after = reader.read_host_memory(before)
    assert (after.host, after.devices) == (replace(HOST, memory_available_mb=7.0), before.devices)


def test_a_machine_with_several_vendors_shows_them_all() -> None:
    clock = FakeClock()
    vendors = (Vendor.NVIDIA, Vendor.AMD, Vendor.INTEL)
    snapshot = MachineReader(
        [FallbackChain(v, [FixedProbe(v)], clock) for v in vendors], FixedHost(), clock, 5
    ).snapshot()
    assert [device.id for device in snapshot.devices] == ["nvidia-0", "amd-0", "intel-0"]
    assert snapshot.host == HOST
    assert snapshot.taken_at == clock.now()


def test_a_probe_that_ignores_its_timeout_does_not_delay_the_others(slow: SlowTool) -> None:
    clock = FakeClock()
    chains = [
        FallbackChain(Vendor.AMD, [slow], clock),
        FallbackChain(Vendor.NVIDIA, [FixedProbe(Vendor.NVIDIA)], clock),
    ]
    machine = MachineReader(chains, FixedHost(), clock, 1.5)
    for _ in range(2):
        snapshot = machine.snapshot()
        assert [device.id for device in snapshot.devices] == ["nvidia-0"]
        assert [(problem.source, problem.kind) for problem in snapshot.problems] == [("slow", "timeout")]


class FlakyProbe(FixedProbe):
    """Fails once, then succeeds."""

    def __init__(self, vendor: Vendor) -> None:
        super().__init__(vendor)
        self.timeouts: list[float] = []

    def read(self, timeout_s: float) -> Reading:
        self.timeouts.append(timeout_s)
        if len(self.timeouts) == 1:
            raise ProbeCrashed("fixed", "once")
        return self.reading


class PassingTime(FixedHost):
    """A host that takes longer to read than the pauses of the probes last."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock

    def read(self) -> Host:
        self._clock.time += 5
        return HOST


def test_a_pause_that_ends_during_a_reading_does_not_call_the_probe_in_it() -> None:
    clock = FakeClock()
    probe = FlakyProbe(Vendor.AMD)
    chain = FallbackChain(Vendor.AMD, [probe], clock)
    chain.read(1)
    machine = MachineReader([chain], PassingTime(clock), clock, 5)
    assert [problem.kind for problem in machine.snapshot().problems] == ["crashed"]
    assert len(probe.timeouts) == 1
    assert [device.id for device in machine.snapshot().devices] == ["amd-0"]
    assert all(timeout > 0.5 for timeout in probe.timeouts)


def test_if_no_thread_can_be_started_the_vendor_is_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    clock = FakeClock()
    chain = FallbackChain(Vendor.AMD, [FixedProbe(Vendor.AMD)], clock)
    snapshot = MachineReader([chain], FixedHost(), clock, 5).snapshot()
    assert snapshot.host == HOST
    assert [problem.kind for problem in snapshot.problems] == ["timeout"]


def test_an_unhealthy_device_is_a_problem_too() -> None:
    ill = Device(id="GPU-a", vendor=Vendor.NVIDIA, name="Test", fault="GPU is lost")
    noted = Problem(source="smi", kind="garbled", message="odd")
    snapshot = assemble(None, HOST, [Reading(devices=(ill,), problems=(noted,))])
    assert [problem.kind for problem in snapshot.problems] == ["garbled", "unhealthy"]
    assert "GPU is lost" in snapshot.problems[1].message
