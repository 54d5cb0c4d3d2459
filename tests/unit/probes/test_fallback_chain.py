import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from msgspec.structs import replace

from gpuyard.errors import ProbeCrashed, ProbeMissing, ProbeTimeout
from gpuyard.model.machine_snapshot import Device, Process, Reading, Vendor
from gpuyard.probes.fallback_chain import FallbackChain
from tests.fakes.clock import FakeClock

CARD = Device(id="GPU-a", vendor=Vendor.NVIDIA, index=0, name="Test", memory_used_mb=5.0, processes=(Process(pid=1),))
OTHER = Device(id="GPU-b", vendor=Vendor.NVIDIA, index=1, name="Test")


class ScriptedProbe:
    """Answer from a list and then repeat its last item; an exception in the list is raised."""

    vendor = Vendor.NVIDIA

    def __init__(self, name: str, *answers: Reading | Exception, may_hang: bool = False) -> None:
        self.name = name
        self.may_hang = may_hang
        self.timeouts: list[float] = []
        self._answers = list(answers)

    def read(self, timeout_s: float) -> Reading:
        self.timeouts.append(timeout_s)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


class StuckProbe:
    """Hang until released, as a call into a broken driver does."""

    name = "stuck"
    vendor = Vendor.NVIDIA
    may_hang = True

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.calls = 0

    def read(self, timeout_s: float) -> Reading:
        self.calls += 1
        self.let_go.wait(60)
        return Reading(devices=(CARD,))


@pytest.fixture
def stuck() -> Iterator[StuckProbe]:
    probe = StuckProbe()
    yield probe
    probe.let_go.set()


def missing(name: str) -> ProbeMissing:
    return ProbeMissing(name, "not installed")


def crash(name: str = "smi") -> ProbeCrashed:
    return ProbeCrashed(name, "ended badly", hint="see dmesg")


def chain(*probes: ScriptedProbe | StuckProbe, clock: FakeClock | None = None) -> FallbackChain:
    return FallbackChain(Vendor.NVIDIA, probes, clock or FakeClock())


def test_the_first_probe_that_answers_is_used_and_failures_are_reported() -> None:
    second = ScriptedProbe("smi", Reading(devices=(OTHER,)))
    assert chain(ScriptedProbe("nvml", Reading(devices=(CARD,))), second).read(2).devices == (CARD,)
    assert second.timeouts == []
    reading = chain(ScriptedProbe("nvml", crash("nvml")), ScriptedProbe("smi", Reading(devices=(CARD,)))).read(2)
    assert reading.devices == (CARD,)
    (problem,) = reading.problems
    assert (problem.source, problem.kind, problem.hint, problem.vendor) == (
        "nvml", "crashed", "see dmesg", Vendor.NVIDIA,
    )  # fmt: skip
    reading = chain(ScriptedProbe("nvml", KeyError("oops")), ScriptedProbe("smi", Reading(devices=(CARD,)))).read(2)
    assert reading.devices == (CARD,)
    assert "KeyError" in reading.problems[0].message
    reading = chain(ScriptedProbe("smi", TimeoutError("socket"))).read(2)
    assert "TimeoutError" in reading.problems[0].message
    (problem,) = chain(ScriptedProbe("nvml", missing("nvml")), ScriptedProbe("smi", missing("smi"))).read(2).problems
    assert (problem.source, problem.kind) == ("nvml, smi", "missing")


def test_a_failed_probe_is_paused_and_its_problem_stays_unchanged() -> None:
    clock = FakeClock()
    probe = ScriptedProbe("smi", crash(), ProbeCrashed("smi", "ended with another status"), Reading(devices=(CARD,)))
    watched = chain(probe, clock=clock)
    first = watched.read(2).problems
    assert watched.is_resting()
    assert watched.read(2).problems == first
    assert len(probe.timeouts) == 1
    clock.time += 1.1
    assert not watched.is_resting()
    assert watched.read(2).problems == first, "the same kind of problem with another message is not a new problem"
    clock.time += 1.1
    assert watched.read(2).problems == first, "the pause doubles after the second failure"
    clock.time += 1.1
    assert watched.read(2) == Reading(devices=(CARD,))


def test_the_first_probe_is_used_again_after_it_recovers() -> None:
    clock = FakeClock()
    first = ScriptedProbe("nvml", crash("nvml"), Reading(devices=(CARD,)))
    watched = chain(first, ScriptedProbe("smi", Reading(devices=(OTHER,))), clock=clock)
    assert watched.read(2).devices == (OTHER,)
    clock.time += 2
    assert watched.read(2) == Reading(devices=(CARD,))


def test_a_device_that_is_no_longer_listed_is_unhealthy_with_unknown_figures_until_it_comes_back() -> None:
    both, one = Reading(devices=(CARD, OTHER)), Reading(devices=(OTHER,))
    watched = chain(ScriptedProbe("smi", both, one, one, both))
    watched.read(2)
    for _ in range(2):
        other, gone = watched.read(2).devices
        assert other == OTHER
        assert (gone.id, gone.name, gone.index, gone.healthy) == ("GPU-a", "Test", 0, False)
        assert (gone.memory_used_mb, gone.processes) == (None, None)
    assert watched.read(2) == both


def test_a_removed_mig_instance_is_not_a_problem() -> None:
    part = Device(id="MIG-1", vendor=Vendor.NVIDIA, parent="GPU-a")
    watched = chain(ScriptedProbe("nvml", Reading(devices=(CARD, part)), Reading(devices=(CARD,))))
    watched.read(2)
    assert watched.read(2).devices == (CARD,)


def test_a_fallback_with_other_ids_makes_only_a_device_unhealthy_whose_pci_address_is_missing() -> None:
    by_bus = Device(id="0000:01:00.0", vendor=Vendor.NVIDIA)
    fails_later = ScriptedProbe("nvml", Reading(devices=(CARD,)), crash("nvml"))
    watched = chain(fails_later, ScriptedProbe("smi", Reading(devices=(by_bus,))))
    watched.read(2)
    assert watched.read(2).devices == (by_bus,)
    first, second = (Device(id=f"GPU-{n}", vendor=Vendor.NVIDIA, pci_bus_id=f"0000:0{n}:00.0") for n in (1, 2))
    by_bus = Device(id="0000:01:00.0", vendor=Vendor.NVIDIA, pci_bus_id="0000:01:00.0")
    watched = chain(
        ScriptedProbe("nvml", Reading(devices=(first, second)), crash("nvml")),
        ScriptedProbe("smi", Reading(devices=(by_bus,))),
    )
    watched.read(2)
    assert [(device.id, device.healthy) for device in watched.read(2).devices] == [
        ("0000:01:00.0", True),
        ("GPU-2", False),
    ]


def test_known_devices_are_unhealthy_when_no_probe_answers() -> None:
    watched = chain(ScriptedProbe("smi", Reading(devices=(CARD,)), ProbeTimeout("smi", "no answer within 2.0 s")))
    watched.read(2)
    (card,) = watched.read(2).devices
    assert card.id == "GPU-a"
    assert card.fault == "smi: no answer within 2.0 s"


def test_a_hanging_call_is_abandoned_and_the_next_probe_is_used(stuck: StuckProbe) -> None:
    watched = chain(stuck, ScriptedProbe("sh", Reading(devices=(CARD,))))
    reading = watched.read(3)
    assert reading.devices == (CARD,)
    assert (reading.problems[0].source, reading.problems[0].kind) == ("stuck", "timeout")


def test_a_hanging_probe_is_not_called_again_until_its_call_returned(stuck: StuckProbe) -> None:
    clock = FakeClock()
    watched = chain(stuck, clock=clock)
    watched.read(0.05)
    clock.time += 100
    assert watched.read(0.05).problems[0].kind == "timeout"
    assert stuck.calls == 1
    stuck.let_go.set()
    clock.time += 100
    _wait_for(lambda: watched.read(5).devices == (CARD,), clock)


def _wait_for(condition: Callable[[], bool], clock: FakeClock) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        clock.time += 100


def test_only_a_probe_with_an_installed_fallback_leaves_some_time_for_it() -> None:
    first, second = ScriptedProbe("nvml", crash("nvml")), ScriptedProbe("sh", Reading())
    chain(first, second).read(2000)
    assert first.timeouts[0] == pytest.approx(1200, abs=100)
    assert second.timeouts[0] == pytest.approx(2000, abs=100)
    first, absent = ScriptedProbe("nvml", Reading()), ScriptedProbe("no-such-tool", missing("no-such-tool"))
    chain(first, absent).read(2000)
    assert first.timeouts[0] == pytest.approx(2000, abs=100)


def test_a_slow_call_is_used_if_no_other_probe_answers(stuck: StuckProbe) -> None:
    class LetGo(ScriptedProbe):
        def read(self, timeout_s: float) -> Reading:
            stuck.let_go.set()
            raise crash("sh")

    reading = chain(stuck, LetGo("sh", Reading())).read(10)
    assert reading.devices == (CARD,)
    assert reading.problems == ()


def test_no_probe_is_called_without_time_left() -> None:
    probe = ScriptedProbe("smi", Reading(devices=(CARD,)))
    assert chain(probe).read(0) == Reading()
    assert probe.timeouts == []


class MemoryReader(ScriptedProbe):
    """A probe that reads the memory of single devices at little cost."""

    def __init__(self, *answers: Reading | Exception, now: Device | Exception | None = None) -> None:
        super().__init__("quick", *answers, may_hang=True)
        self.now = now
        self.asked: list[list[str]] = []

    def read_memory(self, devices: Sequence[Device]) -> list[Device]:
        self.asked.append([device.id for device in devices])
        if isinstance(self.now, Exception):
            raise self.now
        return [self.now] if self.now is not None else []


def test_memory_is_read_of_the_devices_asked_for_and_all_else_stays() -> None:
    busy = replace(CARD, utilization_percent=70.0, processes=(Process(pid=1, memory_mb=5.0, utilization_percent=60.0),))
    grown = (Process(pid=1, memory_mb=80.0), Process(pid=2, memory_mb=10.0))
    probe = MemoryReader(Reading(devices=(busy, OTHER)))
    probe.now = Device(id="GPU-a", vendor=Vendor.NVIDIA, memory_used_mb=90.0, processes=grown)
    reader = chain(probe)
    assert reader.read_memory(["GPU-a"], 1.0) == Reading(), "it was never read"
    reader.read(1.0)
    (device,) = reader.read_memory(["GPU-a", "unknown"], 1.0).devices
    assert probe.asked == [["GPU-a"]]
    assert (device.name, device.utilization_percent, device.memory_used_mb) == ("Test", 70.0, 90.0)
    assert [(each.memory_mb, each.utilization_percent) for each in device.processes or ()] == [
        (80.0, 60.0),
        (10.0, None),
    ]


def test_memory_is_not_read_through_a_tool_nor_after_a_failure() -> None:
    tool = chain(ScriptedProbe("smi", Reading(devices=(CARD,))))
    tool.read(1.0)
    assert tool.read_memory(["GPU-a"], 1.0) == Reading()
    failing = MemoryReader(Reading(devices=(CARD,)), now=crash("quick"))
    library = chain(failing)
    library.read(1.0)
    assert library.read_memory(["GPU-a"], 1.0) == Reading()
    assert library.read(1.0).problems == (), "the next full reading decides"
