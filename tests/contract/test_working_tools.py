"""Each tool of a vendor yields that vendor's devices in a snapshot, and tools of several vendors work at once."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuyard.model.machine_snapshot import Snapshot, Vendor
from gpuyard.probes.local_machine import local_machine
from gpuyard.probes.simulated_devices import SimulatedDevices
from tests.unit.probes import samples_amd, samples_apple, samples_intel, samples_nvidia, samples_rocm

Tools = Callable[[str, str], Path]
PRINTED = {
    "nvidia-smi": (Vendor.NVIDIA, samples_nvidia.XML),
    "rocm-smi": (Vendor.AMD, samples_rocm.ROCM_SMI_JSON),
    "radeontop": (Vendor.AMD, samples_amd.RADEONTOP),
    "intel_gpu_top": (Vendor.INTEL, samples_intel.SAMPLES["intel_gpu_top"][0]),
    "ioreg": (Vendor.APPLE, samples_apple.SAMPLES["ioreg"][0]),
    "powermetrics": (Vendor.APPLE, samples_apple.SAMPLES["powermetrics"][0]),
}


@pytest.fixture(autouse=True)
def only_stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tools: Tools) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "tools"))


def prints(tools: Tools, tool: str) -> None:
    tools(tool, f"print({PRINTED[tool][1]!r})")


def check(snapshot: Snapshot) -> None:
    """Check the invariants of every snapshot."""
    ids = [device.id for device in snapshot.devices]
    assert len(set(ids)) == len(ids)
    for device in snapshot.devices:
        assert device.parent is None or device.parent in ids
        assert device.processes is None or len({process.pid for process in device.processes}) == len(device.processes)
    assert {problem.source for problem in snapshot.problems if problem.kind == "unhealthy"} == {
        device.id for device in snapshot.devices if not device.healthy
    }


@pytest.mark.parametrize("tool", PRINTED)
def test_each_tool_reports_its_vendor_s_devices(tools: Tools, tool: str) -> None:
    prints(tools, tool)
    snapshot = local_machine(20).snapshot()
    assert snapshot.devices
    assert {device.vendor for device in snapshot.devices} == {PRINTED[tool][0]}
    check(snapshot)


def test_devices_of_all_vendors_are_in_one_snapshot(tools: Tools) -> None:
    for tool in ("nvidia-smi", "rocm-smi", "intel_gpu_top", "ioreg"):
        prints(tools, tool)
    snapshot = local_machine(20).snapshot()
    assert {device.vendor for device in snapshot.devices} == {"nvidia", "amd", "intel", "apple"}
    check(snapshot)


def test_a_tool_that_works_again_is_used_again(tools: Tools) -> None:
    machine = local_machine(20)
    tools("rocm-smi", "raise SystemExit(3)")
    assert machine.snapshot().devices == ()
    prints(tools, "rocm-smi")
    deadline = time.monotonic() + 90
    while not (snapshot := machine.snapshot()).devices:
        assert time.monotonic() < deadline
    assert {device.vendor for device in snapshot.devices} == {Vendor.AMD}


def test_simulated_devices_keep_the_same_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUYARD_SIMULATE", "2x24GB")
    snapshot = local_machine(20).snapshot()
    assert [device.id for device in snapshot.devices] == [device.id for device in SimulatedDevices().devices]
    check(snapshot)
