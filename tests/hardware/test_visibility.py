"""On a machine with an NVIDIA card: each framework, under `gpuyard run`, sees exactly the card of its lease."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gpuyard.probes.devices_and_processes import pci_bus_id

pytestmark = pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no NVIDIA card")

PRINT_RESULT = """
import json, os
print(json.dumps({
    "visible": os.environ["CUDA_VISIBLE_DEVICES"],
    "order": os.environ["CUDA_DEVICE_ORDER"],
    "count": count,
    "card": card,
}))
"""
PYTORCH = """
import torch
count = torch.cuda.device_count()
properties = torch.cuda.get_device_properties(torch.ones(1024, device="cuda").device)
card = f"GPU-{properties.uuid}"
"""
CUPY = """
import cupy
count = cupy.cuda.runtime.getDeviceCount()
card = cupy.ones(1024).device.pci_bus_id
"""
# JAX does not name the card of its device, but CUDA, which JAX initialized in this process, does.
JAX = """
import ctypes, jax
devices = jax.devices("gpu")
count = len(devices)
jax.numpy.ones(1024, device=devices[0]).block_until_ready()
name = ctypes.create_string_buffer(64)
assert ctypes.CDLL("libcuda.so.1").cuDeviceGetPCIBusId(name, 64, devices[0].local_hardware_id) == 0
card = name.value.decode()
"""
FRAMEWORKS = {"torch": PYTORCH, "cupy": CUPY, "jax": JAX}


def cards() -> list[tuple[int, str, str]]:
    """Return index, UUID and PCI bus id of each card, from `nvidia-smi`."""
    query = ["nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = [line.split(", ") for line in lines if line.strip()]
    return [(int(index), uuid, bus_id) for index, uuid, bus_id in rows]


def seen_by(framework: str, *options: str, **environment: str) -> dict[str, Any]:
    if find_spec(framework) is None:
        pytest.skip(f"there is no {framework}")
    script = FRAMEWORKS[framework] + PRINT_RESULT
    command = [sys.executable, "-m", "gpuyard", "run", "--vram", "4G", *options, "--", sys.executable, "-c", script]
    own = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **environment}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, **own}
    )
    assert result.returncode == 0, result.stderr
    seen: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return seen


def is_card(named: str, uuid: str, bus_id: str) -> bool:
    """Compare by UUID, or by bus id (a domain of four or eight digits)."""
    return named == uuid or pci_bus_id(named) == pci_bus_id(bus_id)


@pytest.fixture(autouse=True)
def own_ledger(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_framework_sees_exactly_the_card_of_its_lease(framework: str) -> None:
    for index, uuid, bus_id in cards():
        seen = seen_by(framework, "--device", str(index))
        assert (int(seen["visible"]), seen["order"], seen["count"]) == (index, "PCI_BUS_ID", 1)
        assert is_card(seen["card"], uuid, bus_id), (seen, uuid, bus_id)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_outer_cuda_visible_devices_limits_the_cards(framework: str) -> None:
    index, uuid, bus_id = cards()[-1]
    seen = seen_by(framework, CUDA_VISIBLE_DEVICES=uuid)
    assert (seen["visible"], seen["count"]) == (str(index), 1)
    assert is_card(seen["card"], uuid, bus_id), (seen, uuid, bus_id)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_framework_sees_the_leased_card_by_uuid_if_configured(framework: str, own_home: Path) -> None:
    own_home.mkdir(exist_ok=True)
    (own_home / "config.toml").write_text('[devices]\nvisible = "uuid"\n')
    index, uuid, bus_id = cards()[-1]
    seen = seen_by(framework, "--device", str(index))
    assert (seen["visible"], seen["count"]) == (uuid, 1)
    assert is_card(seen["card"], uuid, bus_id), (seen, uuid, bus_id)
