"""From a misbehaving driver to the output of `gpuyard devices`, through the real probe and the fake NVML."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.nvml import FakeDevice, FakeMemory, FakeNvml, FakeState, Result, build_fake_nvml

pytestmark = pytest.mark.needs("cc")

MIB = 1024 * 1024
CARDS = tuple(
    FakeDevice(
        uuid=f"GPU-0000000{number}-aaaa-bbbb-cccc-000000000000",
        name="NVIDIA Test",
        pci=f"00000000:0{number}:00.0",
        memory=FakeMemory(total=24576 * MIB, reserved=400 * MIB, used=1000 * MIB),
        utilization=12,
        power_mw=50_000,
    )
    for number in (1, 2)
)
# Far longer than the deadline of a snapshot, so that a probe that waits for the driver fails the test.
HANG_S = 100.0
TWO_SNAPSHOTS = (
    "import json, sys\n"
    "from gpuyard.model.machine_snapshot import snapshot_as_dict\n"
    "from gpuyard.probes.local_machine import local_machine\n"
    "machine = local_machine(60.0)\n"
    "for _ in range(2):\n"
    "    print(json.dumps(snapshot_as_dict(machine.snapshot())), flush=True)\n"
    "    machine._deadline_s = float(sys.stdin.readline())\n"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_fake_nvml(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def nvml(library: Path, tmp_path: Path) -> FakeNvml:
    return FakeNvml(library=library, state_file=tmp_path / "state")


def devices(nvml: FakeNvml, *arguments: str) -> tuple[dict[str, Any], float]:
    """Return the JSON of `gpuyard devices`, and how long it took."""
    started = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-m", "gpuyard", "devices", "--json", "--deadline", "3", *arguments],
        capture_output=True, text=True, timeout=90, check=True, env={**os.environ, **nvml.environment()},
    )  # fmt: skip
    shape: dict[str, Any] = json.loads(result.stdout)
    return shape, time.monotonic() - started


def two_snapshots(nvml: FakeNvml, between: Callable[[], None], deadline_s: float = 60.0) -> list[dict[str, Any]]:
    """Return two snapshots: the first with a long deadline, while the driver answers, then one within `deadline_s`."""
    process = subprocess.Popen(
        [sys.executable, "-c", TWO_SNAPSHOTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, **nvml.environment()},
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    snapshots = [json.loads(process.stdout.readline())]
    between()
    process.stdin.write(f"{deadline_s}\n")
    process.stdin.flush()
    snapshots.append(json.loads(process.stdout.readline()))
    process.communicate("0\n", timeout=90)
    return snapshots


def test_cards_are_read_through_the_library(nvml: FakeNvml) -> None:
    nvml.write(FakeState(devices=CARDS))
    shape, _ = devices(nvml, "--deadline", "60")
    assert [(d["index"], d["memory_used_mb"], d["memory_free_mb"]) for d in shape["devices"]] == [
        (0, 1000, 23176),
        (1, 1000, 23176),
    ]
    assert not [problem for problem in shape["problems"] if problem["vendor"] == "nvidia"]


@pytest.mark.parametrize("function", ["nvmlInitWithFlags", "nvmlDeviceGetCount*", "nvmlDeviceGetHandleBy*"])
def test_a_hanging_driver_delays_neither_the_snapshot_nor_the_end_of_the_program(nvml: FakeNvml, function: str) -> None:
    nvml.write(FakeState(devices=CARDS, hangs={function: HANG_S}))
    shape, took = devices(nvml)
    assert took < HANG_S / 2
    assert shape["host"]["memory_total_mb"] > 0
    assert ("nvml", "timeout") in [(problem["source"], problem["kind"]) for problem in shape["problems"]]


def test_while_the_library_hangs_nvidia_smi_answers(nvml: FakeNvml, tools: Callable[[str, str], Path]) -> None:
    from tests.unit.probes.samples_nvidia import XML

    tools("nvidia-smi", f"print({XML!r})")
    nvml.write(FakeState(devices=CARDS, hangs={"nvmlInitWithFlags": HANG_S}))
    shape, _ = devices(nvml, "--deadline", "8")
    assert [device["name"] for device in shape["devices"]] == ["NVIDIA Test One", "NVIDIA Test Two"]


def test_a_driver_that_begins_to_hang_leaves_its_cards_listed_as_unhealthy(nvml: FakeNvml) -> None:
    nvml.write(FakeState(devices=CARDS))
    hanging = FakeState(devices=CARDS, hangs={"nvmlDeviceGetCount*": HANG_S})
    before, after = two_snapshots(nvml, lambda: nvml.write(hanging), deadline_s=2.0)
    assert [device["healthy"] for device in before["devices"]] == [True, True]
    assert [device["id"] for device in after["devices"]] == [device["id"] for device in before["devices"]]
    assert [(d["healthy"], d["memory_used_mb"]) for d in after["devices"]] == [(False, None)] * 2


def test_a_removed_card_is_unhealthy_and_the_other_still_works(nvml: FakeNvml) -> None:
    nvml.write(FakeState(devices=CARDS))
    _, after = two_snapshots(nvml, lambda: nvml.write(FakeState(devices=CARDS[:1])))
    assert [(d["id"], d["healthy"]) for d in after["devices"]] == [(CARDS[0].uuid, True), (CARDS[1].uuid, False)]
    assert any(p["kind"] == "unhealthy" and p["source"] == CARDS[1].uuid for p in after["problems"])


def test_a_driver_that_is_not_loaded_is_reported_with_a_hint(nvml: FakeNvml) -> None:
    nvml.write(FakeState(init=Result.DRIVER_NOT_LOADED))
    shape, _ = devices(nvml, "--deadline", "60")
    (problem,) = [problem for problem in shape["problems"] if problem["source"] == "nvml"]
    assert "Driver Not Loaded" in problem["message"]
    assert "modprobe" in problem["hint"]
