"""Links between NVIDIA cards through the real ctypes path, over a fake libnvidia-ml.so.1 in a process of its own."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.nvml import FakeDevice, FakeMemory, FakeNvml, FakeState, Result, build_fake_nvml

pytestmark = pytest.mark.needs("cc")

SINGLE, HOST_BRIDGE, SYSTEM = 10, 30, 50
BUS = [f"00000000:{number:02X}:00.0" for number in (0x0A, 0x0B, 0x41, 0x42)]
CARDS = tuple(
    FakeDevice(uuid=f"GPU-{number}", name="NVIDIA A100", pci=bus, memory=FakeMemory(total=40 << 30))
    for number, bus in enumerate(BUS)
)
# Reads the machine twice, and prints its topology and the calls that the second reading made for it.
PROGRAM = """
import json
import msgspec
from gpuyard.probes import device_links

calls = []
read = device_links.read_local_links
device_links.read_local_links = lambda devices: calls.append(len(devices)) or read(devices)

from gpuyard.probes.local_machine import local_machine

reader = local_machine(20.0)
first, second = reader.snapshot(), reader.snapshot()
assert first.topology == second.topology
print(json.dumps({"calls": calls, **msgspec.to_builtins(first.topology)}))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_fake_nvml(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def fake(library: Path, tmp_path: Path) -> FakeNvml:
    return FakeNvml(library=library, state_file=tmp_path / "nvml")


def read(fake: FakeNvml, *devices: FakeDevice, path: str | None = None) -> dict[str, Any]:
    fake.write(FakeState(devices=devices))
    variables = {**os.environ, **fake.environment()} | ({} if path is None else {"PATH": path})
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=variables, stdout=subprocess.PIPE, text=True, check=True, timeout=90
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def links_of(found: dict[str, Any]) -> dict[tuple[str, str], tuple[str, int | None]]:
    return {(each["one"], each["other"]): (each["kind"], each["count"]) for each in found["links"]}


def test_links_between_two_cards_are_counted_and_read_once(fake: FakeNvml) -> None:
    first = replace(CARDS[0], nvlinks=(BUS[1], "off", BUS[1], BUS[2]), shares={BUS[3]: SYSTEM})
    second = replace(CARDS[1], nvlinks=(BUS[0], BUS[0], "off"), shares={BUS[2]: HOST_BRIDGE})
    third = replace(CARDS[2], nvlinks=(BUS[0],), shares={BUS[3]: SINGLE})
    found = read(fake, first, second, third, CARDS[3])
    assert found["calls"] == [4]
    assert links_of(found) == {
        ("GPU-0", "GPU-1"): ("nvlink", 2),
        ("GPU-0", "GPU-2"): ("nvlink", 1),
        ("GPU-0", "GPU-3"): ("across-nodes", None),
        ("GPU-1", "GPU-2"): ("host-bridge", None),
        ("GPU-2", "GPU-3"): ("pcie-switch", None),
    }


def test_cards_at_nvswitches_have_as_many_links_as_the_one_with_fewer(fake: FakeNvml) -> None:
    cards = [replace(card, nvlinks=("switch",) * count) for card, count in zip(CARDS, (6, 6, 4, 6), strict=True)]
    cards[3] = replace(cards[3], is_apart=True, shares={BUS[0]: HOST_BRIDGE})
    assert links_of(read(fake, *cards)) == {
        ("GPU-0", "GPU-1"): ("nvlink", 6),
        ("GPU-0", "GPU-2"): ("nvlink", 4),
        ("GPU-1", "GPU-2"): ("nvlink", 4),
        ("GPU-0", "GPU-3"): ("host-bridge", None),
    }


def test_a_driver_that_says_nothing_leaves_links_unknown(fake: FakeNvml) -> None:
    assert links_of(read(fake, *CARDS)) == {}


def test_a_card_that_does_not_answer_has_unknown_links(fake: FakeNvml) -> None:
    lost = replace(CARDS[0], nvlinks=(BUS[1],), results={"nvmlDeviceGetNvLink*": Result.UNKNOWN_ERROR})
    second = replace(CARDS[1], nvlinks=(BUS[2],))
    third = replace(CARDS[2], nvlinks=(BUS[1],))
    assert links_of(read(fake, lost, second, third)) == {("GPU-1", "GPU-2"): ("nvlink", 1)}
