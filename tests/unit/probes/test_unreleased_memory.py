"""Memory that stays in use on an NVIDIA card when no process is left."""

from types import ModuleType
from typing import Any

import pytest
from msgspec.structs import replace

from gpuyard.model.machine_snapshot import Device, Process, Vendor
from gpuyard.probes.nvidia import nvml_health_and_energy as nvml_health
from gpuyard.probes.nvidia.nvml_health_and_energy import NvmlHealth

USED = Device(id="G0", vendor=Vendor.NVIDIA, memory_used_mb=4096.0, memory_total_mb=24576.0, processes=())


class SilentDriver:
    """Supports no figure."""

    nvml = ModuleType("pynvml")

    def ask(self, function: str, *arguments: Any) -> None:
        return None


def unreleased(*devices: Device, lists_all_processes: bool = True) -> list[float | None]:
    """Return the figure of each of several readings of one card."""
    health = NvmlHealth(lists_all_processes=lists_all_processes)
    return [health.read(SilentDriver(), None, device).unreleased_mb for device in devices]


def test_it_counts_only_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unreleased(USED, USED) == [None, None]
    monkeypatch.setattr(nvml_health, "UNRELEASED_AFTER_S", 0.0)
    assert unreleased(USED, USED) == [4096.0, 4096.0]


@pytest.mark.parametrize(
    "device",
    [
        replace(USED, processes=(Process(pid=7, memory_mb=4000.0),)),
        replace(USED, processes=None),
        replace(USED, memory_used_mb=500.0),
        replace(USED, memory_used_mb=None),
    ],
    ids=["a process", "unknown processes", "little memory", "unknown memory"],
)
def test_memory_with_a_process_or_unknown_does_not_count(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml_health, "UNRELEASED_AFTER_S", 0.0)
    assert unreleased(device) == [None]
    assert unreleased(USED, device, USED) == [4096.0, None, 4096.0]


def test_in_a_container_nothing_is_concluded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml_health, "UNRELEASED_AFTER_S", 0.0)
    assert unreleased(USED, lists_all_processes=False) == [None]
