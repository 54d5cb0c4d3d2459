"""GPUs that PyTorch sees in this process and no probe does: scripts get them, with a warning."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpuyard import GPUScheduler, get_gpu_info, get_total_num_gpus
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.model.machine_snapshot import Device, Host, Problem, Snapshot, Vendor
from gpuyard.scripting import gpu_info

UUIDS = ("11111111-2222-3333-4444-555555555555", "66666666-7777-8888-9999-000000000000")
NOT_INSTALLED = Problem(source="nvml, nvidia-smi", kind="missing", message="not installed", vendor=Vendor.NVIDIA)
SEEN = r"PyTorch sees 2 GPUs, and no probe does \(nvml, nvidia-smi: not installed\)"


@pytest.fixture
def machine(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which no probe sees a GPU."""
    seen = Snapshot(taken_at=0.0, host=Host(), problems=(NOT_INSTALLED,))
    monkeypatch.setattr(gpu_info, "read_machine", lambda: seen)
    for name in ("GPUYARD_SIMULATE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


class Torch:
    """PyTorch with two GPUs, as far as gpuyard asks it."""

    def __init__(self, **unlike: Any) -> None:
        self.current = 0
        self.version = SimpleNamespace(cuda="12.4", hip=None)
        self.cuda = SimpleNamespace(
            is_available=lambda: True,
            is_initialized=lambda: True,
            init=lambda: None,
            device_count=lambda: 2,
            set_device=lambda number: setattr(self, "current", number),
            get_device_properties=lambda number: SimpleNamespace(
                **{"uuid": UUIDS[number], "name": "Test 24", "total_memory": 24 * 1024**3, **unlike}
            ),
        )


@pytest.fixture
def torch(machine: None, monkeypatch: pytest.MonkeyPatch) -> Torch:
    torch = Torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


def test_the_gpus_of_pytorch_are_counted_with_a_warning_that_names_what_is_missing(torch: Torch) -> None:
    with pytest.warns(UserWarning, match=SEEN):
        assert get_total_num_gpus() == 2
    with pytest.warns(UserWarning, match="their load and free memory are unknown"):
        first, second = get_gpu_info()
    assert (first["gpu_id"], first["name"], first["memory_total"], first["memory_free"]) == (
        0, "Test 24", 24576.0, None,
    )  # fmt: skip
    assert (second["gpu_id"], second["uuid"]) == (1, f"GPU-{UUIDS[1]}")


def test_scripts_lease_the_gpus_of_pytorch_one_after_the_other(torch: Torch) -> None:
    first, second, too_large = (GPUScheduler(max_wait_time=1, vram=vram) for vram in (None, None, "30G"))
    with pytest.warns(UserWarning, match=SEEN):
        first_ids = first.acquire()
    with pytest.warns(UserWarning, match=SEEN):
        second_ids = second.acquire()
    assert sorted([*first_ids, *second_ids]) == [0, 1]
    assert torch.current == second_ids[0]
    with pytest.warns(UserWarning, match=SEEN), pytest.raises(UserError, match="24 GB"):
        too_large.acquire()
    second.release()
    first.release()


def test_gpus_without_an_id_are_named_and_not_leased(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", Torch(uuid=None))
    for ask in (get_total_num_gpus, GPUScheduler().acquire):
        with pytest.raises(EnvironmentFault, match=SEEN):
            ask()


def test_gpus_that_a_probe_sees_are_not_asked_for(torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    card = Device(id="GPU-a", vendor=Vendor.NVIDIA, index=0)
    monkeypatch.setattr(gpu_info, "read_machine", lambda: Snapshot(taken_at=0.0, host=Host(), devices=(card,)))
    assert gpu_info.snapshot().devices == (card,)


def test_without_pytorch_there_is_no_gpu(machine: None) -> None:
    assert get_total_num_gpus() == 0
