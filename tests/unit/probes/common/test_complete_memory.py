"""Memory that a probe does not report: memory shared with the host, and impossible figures."""

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gpuyard.model.machine_snapshot import Device, Host, Process, Reading, Vendor
from gpuyard.probes.local_machine import replay
from gpuyard.probes.machine_reader import assemble
from gpuyard.probes.nvidia import nvml as nvml_probe
from gpuyard.probes.nvidia.nvidia_smi import parse_csv, parse_xml
from gpuyard.probes.nvidia.nvml import Nvml
from tests.unit.probes.samples_nvidia import GB10_CSV, GB10_XML

HOST = Host(memory_total_mb=124610.11, memory_available_mb=115787.47)


def memory_of(device: Device) -> tuple[float | None, float | None, float | None]:
    return device.memory_total_mb, device.memory_used_mb, device.memory_free_mb


def settled(device: Device, host: Host = HOST) -> Device:
    (found,) = assemble(None, host, [Reading(devices=(device,))]).devices
    return found


def nvidia(name: str, **figures: Any) -> Device:
    return Device(id="GPU-1", vendor=Vendor.NVIDIA, name=name, **figures)


@pytest.mark.parametrize(("vendor", "name", "is_integrated"), [
    (Vendor.AMD, "AMD Radeon Graphics", True),
    (Vendor.AMD, "AMD Radeon(TM) Graphics", True),
    (Vendor.AMD, "AMD Radeon 780M Graphics", True),
    (Vendor.AMD, "Radeon 8060S Graphics", True),
    (Vendor.AMD, "AMD Radeon Vega 8 Graphics", True),
    (Vendor.AMD, "Rembrandt [Radeon 680M]", True),
    (Vendor.AMD, "Navi 31 [Radeon RX 7900 XT]", False),
    (Vendor.AMD, "Radeon RX 7600M XT", False),
    (Vendor.AMD, "AMD Radeon RX 6800S", False),
    (Vendor.AMD, "AMD Radeon AI PRO R9700", False),
    (Vendor.AMD, "Vega 10 XT [Radeon RX Vega 64]", False),
    (Vendor.AMD, "AMD Instinct MI300X OAM", False),
    (Vendor.AMD, None, False),
    (Vendor.NVIDIA, "NVIDIA GB10", True),
    (Vendor.NVIDIA, "NVIDIA GeForce RTX 4090", False),
    (Vendor.APPLE, "Apple M4 Max", True),
])  # fmt: skip
def test_integrated_graphics_are_known_by_name(vendor: Vendor, name: str | None, is_integrated: bool) -> None:
    assert settled(Device(id="a", vendor=vendor, name=name)).is_integrated is is_integrated


def test_intel_s_integrated_graphics_are_known_by_their_place_on_the_bus() -> None:
    places = ("0000:00:02.0", "0000:03:00.0")
    cards = [settled(Device(id=place, vendor=Vendor.INTEL, pci_bus_id=place)) for place in places]
    assert [card.is_integrated for card in cards] == [True, False]


@pytest.mark.parametrize("reading", [parse_xml(GB10_XML), parse_csv(GB10_CSV)], ids=["XML", "CSV"])
def test_a_gb10_is_listed_with_the_memory_of_its_host(reading: Reading) -> None:
    (device,) = assemble(None, HOST, [reading]).devices
    assert (device.name, device.pci_bus_id, device.healthy) == ("NVIDIA GB10", "000f:01:00.0", True)
    assert memory_of(device) == (124610.11, 8822.64, 115787.47)
    assert (device.utilization_percent, device.power_draw_w, device.temperature_c) == (0, 11.17, 35)


def test_a_gb10_is_listed_with_the_memory_of_its_host_here_only() -> None:
    (device,) = assemble(None, HOST, [parse_xml(GB10_XML)]).devices
    assert device.processes == (Process(pid=3141, memory_mb=43, name="/usr/lib/xorg/Xorg"),)
    (device,) = replay("nvidia-smi-xml", GB10_XML.encode()).devices
    assert memory_of(device) == (None, None, None)


@pytest.mark.parametrize("name", ["NVIDIA GB10", "NVIDIA Thor", "Orin (nvgpu)", "NVIDIA Jetson AGX Xavier"])
def test_integrated_gpus_have_the_memory_of_their_host(name: str) -> None:
    assert memory_of(settled(nvidia(name))) == (124610.11, 8822.64, 115787.47)
    assert memory_of(settled(nvidia(name, memory_total_mb=0.0, memory_used_mb=0.0, memory_free_mb=0.0)))[0] == 124610.11


@pytest.mark.parametrize(
    "device",
    [
        nvidia("NVIDIA GB102"), nvidia("NVIDIA GB200"), nvidia("NVIDIA H200"),
        nvidia("NVIDIA GB10", fault="GPU is lost"), Device(id="1", vendor=Vendor.AMD, name="Thor"),
        Device(id="1", vendor=Vendor.NVIDIA),
    ],
)  # fmt: skip
def test_any_other_card_without_memory_figures_does_not_get_the_hosts(device: Device) -> None:
    assert memory_of(settled(device)) == (None, None, None)


def test_figures_of_the_driver_go_before_the_hosts_unless_they_are_zero() -> None:
    assert memory_of(settled(nvidia("NVIDIA GB10", memory_total_mb=1000.0))) == (1000.0, None, None)
    assert memory_of(settled(nvidia("NVIDIA GB10"), Host())) == (None, None, None)
    assert memory_of(settled(nvidia("NVIDIA GB10"), Host(memory_total_mb=5.0))) == (5.0, None, None)
    device = nvidia("NVIDIA H200", memory_total_mb=0.0, memory_used_mb=0.0, memory_free_mb=0.0)
    assert memory_of(settled(device)) == (None, None, None)


def test_a_process_figure_above_the_total_of_its_card_becomes_unknown() -> None:
    processes = (Process(pid=1, memory_mb=112640.0, name="train"), Process(pid=2, memory_mb=32624.0), Process(pid=3))
    card = Device(id="1", vendor=Vendor.AMD, memory_total_mb=32624.0, processes=processes)
    assert settled(card).processes == (Process(pid=1, name="train"), Process(pid=2, memory_mb=32624.0), Process(pid=3))


class NotSupported(Exception):
    value = 3


def refuse(*_: Any) -> Any:
    raise NotSupported("Not Supported")


@pytest.fixture
def gb10(monkeypatch: pytest.MonkeyPatch) -> Any:
    """NVML as it answers on a GB10: no memory and no power limit, but everything else."""
    module: Any = ModuleType("pynvml")
    errors = {"NOT_SUPPORTED": 3, "FUNCTION_NOT_FOUND": 13, "GPU_IS_LOST": 15, "RESET_REQUIRED": 16}
    errors |= {"UNINITIALIZED": 1, "NO_PERMISSION": 4}
    for name, value in errors.items():
        setattr(module, f"NVML_ERROR_{name}", value)
    module.NVMLError, module.NVML_TEMPERATURE_GPU, module.nvmlMemory_v2 = NotSupported, 0, 2
    module.nvmlInit = module.nvmlShutdown = lambda: None
    module.nvmlDeviceGetCount = lambda: 1
    module.nvmlDeviceGetHandleByIndex = lambda index: index
    module.nvmlDeviceGetPciInfo = lambda _: SimpleNamespace(busId="0000000F:01:00.0")
    module.nvmlDeviceGetUUID = lambda _: "GPU-66666666-0000-0000-0000-000000000006"
    module.nvmlDeviceGetName = lambda _: "NVIDIA GB10"
    module.nvmlDeviceGetUtilizationRates = lambda _: SimpleNamespace(gpu=0)
    module.nvmlDeviceGetPowerUsage = lambda _: 11170
    module.nvmlDeviceGetTemperature = lambda *_: 35
    module.nvmlDeviceGetMemoryInfo = module.nvmlDeviceGetEnforcedPowerLimit = module.nvmlDeviceGetMigMode = refuse
    module.nvmlEventSetCreate = module.nvmlDeviceGetTotalEnergyConsumption = refuse
    for kind, pids in (("Compute", (42, 7)), ("Graphics", (42,))):
        listed = [SimpleNamespace(pid=pid, usedGpuMemory=pid * 1048576) for pid in pids]
        setattr(module, f"nvmlDeviceGet{kind}RunningProcesses_v3", lambda _, listed=listed: listed)
    monkeypatch.setattr(nvml_probe, "import_nvml", lambda: module)
    return module


@pytest.mark.usefixtures("gb10")
def test_nvml_lists_a_gb10_although_it_reports_no_memory() -> None:
    (device,) = assemble(None, HOST, [Nvml().read(5)]).devices
    assert (device.id, device.name, device.fault) == ("GPU-66666666-0000-0000-0000-000000000006", "NVIDIA GB10", None)
    assert memory_of(device) == (124610.11, 8822.64, 115787.47)
    assert device.processes == (Process(pid=7, memory_mb=7.0), Process(pid=42, memory_mb=42.0))
