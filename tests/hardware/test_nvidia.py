"""On a machine with an NVIDIA card: figures agree with `nvidia-smi` and with a running PyTorch program."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuyard.model.machine_snapshot import Device
from gpuyard.probes.local_machine import local_machine
from gpuyard.probes.nvidia.nvidia_smi import NvidiaSmi
from gpuyard.probes.nvidia.nvml import Nvml

pytestmark = pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no NVIDIA card")

HOLD = (
    "import sys, torch\n"
    "x = torch.ones(1024, 1024, 1024, device='cuda')\n"  # 4 GiB of float32
    "torch.cuda.synchronize()\n"
    "print(torch.cuda.get_device_properties(0).uuid, torch.cuda.memory_reserved() // 2**20, flush=True)\n"
    "sys.stdin.read()\n"
)


class Program:
    """A PyTorch program that holds memory on the first card."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        uuid, reserved = self.process.stdout.readline().split()
        self.device_id, self.reserved_mb = f"GPU-{uuid}", float(reserved)

    def memory_on(self, devices: tuple[Device, ...]) -> float | None:
        device = next(device for device in devices if device.id == self.device_id)
        return next(p.memory_mb for p in device.processes or () if p.pid == self.process.pid)


@pytest.fixture
def program() -> Iterator[Program]:
    pytest.importorskip("torch")
    running = Program()
    yield running
    running.process.communicate()


def test_nvml_and_nvidia_smi_agree() -> None:
    by_nvml, by_smi = Nvml().read(10).devices, NvidiaSmi().read(30).devices
    assert [device.id for device in by_nvml] == [device.id for device in by_smi]
    for nvml, smi in zip(by_nvml, by_smi, strict=True):
        assert (nvml.name, nvml.index, nvml.pci_bus_id) == (smi.name, smi.index, smi.pci_bus_id)
        assert nvml.memory_total_mb == pytest.approx(smi.memory_total_mb, abs=1)
        assert nvml.memory_used_mb == pytest.approx(smi.memory_used_mb, abs=64)
        assert nvml.power_limit_w == smi.power_limit_w
        assert nvml.temperature_c == pytest.approx(smi.temperature_c, abs=5)


def test_a_pytorch_program_is_listed_with_its_memory(program: Program) -> None:
    by_nvml, by_smi = Nvml().read(10).devices, NvidiaSmi().read(30).devices
    memory_mb = program.memory_on(by_nvml)
    assert memory_mb is not None
    assert program.reserved_mb <= memory_mb <= program.reserved_mb + 2048, "the rest is CUDA's context"
    assert program.memory_on(by_smi) == pytest.approx(memory_mb, abs=1)


def test_memory_of_a_program_is_free_after_its_end(program: Program) -> None:
    before = Nvml().read(10).devices
    program.process.communicate()
    after = Nvml().read(10).devices
    card = next(device for device in after if device.id == program.device_id)
    assert program.process.pid not in [process.pid for process in card.processes or ()]
    used = {device.id: device.memory_used_mb or 0.0 for device in before}
    assert (card.memory_used_mb or 0.0) < used[card.id] - 4096


def test_the_command_shows_the_card(tmp_path: Path) -> None:
    log = tmp_path / "usage.jsonl"
    watch = [sys.executable, "-m", "gpuyard", "watch", "--interval", "0.2", "--count", "3", "--log", str(log)]
    result = subprocess.run(watch, capture_output=True, text=True, timeout=60, check=True, env=dict(os.environ))
    assert "NVIDIA" in result.stdout
    assert len([row for row in map(json.loads, log.read_text().splitlines()) if row["vendor"] == "nvidia"]) >= 3


def test_repeated_snapshots_list_the_same_healthy_devices() -> None:
    machine = local_machine()
    first = machine.snapshot()
    for _ in range(50):
        again = machine.snapshot()
        assert [device.id for device in again.devices] == [device.id for device in first.devices]
        assert all(device.healthy for device in again.devices)
