"""The kernel's tree of PCI devices, and when links are read."""

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuyard.errors import ProbeMissing
from gpuyard.model.machine_snapshot import Device, Vendor
from gpuyard.model.topology import Link, LinkKind, Topology
from gpuyard.probes import device_links as nvml_links
from gpuyard.probes.device_links import LinkReader, read_local_links, read_pci_tree
from tests.executables import write_executable
from tests.unit.probes.links.test_link_tools import ROCM, amd_smi, cards

LINK = Topology(links=(Link(one="G0", other="G1", kind=LinkKind.NVLINK, count=1),))
LONG_S = 30.0


def card(number: int, bus_id: str | None = None, vendor: Vendor = Vendor.INTEL) -> Device:
    return Device(id=f"G{number}", vendor=vendor, index=number, pci_bus_id=bus_id)


def plug_in(root: Path, path: str, node: str | None = None) -> str:
    """Make a device at `path` in the kernel's tree, and return its bus id."""
    folder = root / "sys/devices" / path
    folder.mkdir(parents=True)
    if node is not None:
        (folder / "numa_node").write_text(f"{node}\n")
    slots = root / "sys/bus/pci/devices"
    slots.mkdir(parents=True, exist_ok=True)
    (slots / folder.name).symlink_to(os.path.relpath(folder, slots))
    return folder.name


def kinds(topology: Topology) -> dict[str, LinkKind]:
    return {f"{link.one}{link.other}".replace("G", ""): link.kind for link in topology.links}


def test_what_two_cards_share_is_read_from_their_paths(tmp_path: Path) -> None:
    switch = "pci0000:3a/0000:3a:00.0/0000:3b:00.0"
    buses = [
        plug_in(tmp_path, f"{switch}/0000:3c:00.0/0000:3d:00.0", "0"),
        plug_in(tmp_path, f"{switch}/0000:3c:10.0/0000:3e:00.0", "0"),
        plug_in(tmp_path, "pci0000:3a/0000:3a:02.0/0000:41:00.0", "0"),
        plug_in(tmp_path, "pci0000:5a/0000:5a:00.0/0000:5b:00.0", "0"),
        plug_in(tmp_path, "pci0000:ba/0000:ba:00.0/0000:bb:00.0", "1"),
    ]
    found = read_pci_tree([card(number, bus) for number, bus in enumerate(buses)], tmp_path)
    assert found.nodes == {"G0": 0, "G1": 0, "G2": 0, "G3": 0, "G4": 1}
    assert kinds(found) == {
        "01": LinkKind.PCIE_SWITCH, "02": LinkKind.HOST_BRIDGE, "03": LinkKind.SAME_NODE, "04": LinkKind.ACROSS_NODES,
        "12": LinkKind.HOST_BRIDGE, "13": LinkKind.SAME_NODE, "14": LinkKind.ACROSS_NODES, "23": LinkKind.SAME_NODE,
        "24": LinkKind.ACROSS_NODES, "34": LinkKind.ACROSS_NODES,
    }  # fmt: skip


@pytest.mark.parametrize(("online", "expected"), [("0", {"G0": 0, "G1": 0}), ("0-1", {}), (None, {})])
def test_an_unknown_node_is_the_only_one(tmp_path: Path, online: str | None, expected: dict[str, int]) -> None:
    if online is not None:
        (tmp_path / "sys/devices/system/node").mkdir(parents=True)
        (tmp_path / "sys/devices/system/node/online").write_text(f"{online}\n")
    buses = [plug_in(tmp_path, f"pci0000:0{number}/0000:0{number}:01.0", "-1") for number in range(2)]
    found = read_pci_tree([card(number, bus) for number, bus in enumerate(buses)], tmp_path)
    assert found.nodes == expected
    assert kinds(found) == ({"01": LinkKind.SAME_NODE} if expected else {})


def test_parts_of_a_card_and_unlisted_devices_have_no_links(tmp_path: Path) -> None:
    bus = plug_in(tmp_path, "pci0000:3a/0000:3a:00.0/0000:3b:00.0", "1")
    parts = [replace(card(number, bus), parent="G9") for number in range(2)]
    assert read_pci_tree(parts, tmp_path) == Topology(nodes={"G0": 1, "G1": 1})
    assert read_local_links([card(0), card(1, "0000:01:00.0")], tmp_path) == Topology()


class Driver:
    """Counts readings, and answers once `answers` is set."""

    def __init__(self, *, answers: bool = True) -> None:
        self.read_ids: list[list[str]] = []
        self.answers = threading.Event()
        if answers:
            self.answers.set()

    def read(self, devices: Sequence[Device]) -> Topology:
        self.read_ids.append([device.id for device in devices])
        assert self.answers.wait(LONG_S)
        return LINK


def test_links_are_read_once_and_again_when_the_set_of_healthy_devices_changes() -> None:
    driver = Driver()
    reader = LinkReader(driver.read)
    both = [card(0), card(1)]
    busy = [replace(device, utilization_percent=90.0) for device in both]
    assert [reader.topology(devices, LONG_S) for devices in (both, busy, both)] == [LINK] * 3
    assert driver.read_ids == [["G0", "G1"]]
    reader.topology([both[0], replace(both[1], fault="lost")], LONG_S)
    reader.topology(both, LONG_S)
    assert driver.read_ids == [["G0", "G1"], ["G0"], ["G0", "G1"]]


def test_a_late_answer_is_used_by_a_later_snapshot() -> None:
    driver = Driver(answers=False)
    reader = LinkReader(driver.read)
    assert reader.topology([card(0), card(1)], 0.0) == Topology()
    driver.answers.set()
    deadline = time.monotonic() + LONG_S
    while (found := reader.topology([card(0), card(1)], 0.0)) != LINK:
        assert time.monotonic() < deadline
    assert found == LINK
    assert driver.read_ids == [["G0", "G1"]]


def install(folder: Path, tool: str, prints: str) -> None:
    folder.mkdir(exist_ok=True)
    write_executable(folder / tool, f"#!/bin/sh\n/bin/cat <<'END'\n{prints}\nEND\n")


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty PATH, on a machine without NVML."""

    def missing() -> None:
        raise ProbeMissing("nvml", "not installed")

    monkeypatch.setattr(nvml_links, "import_nvml", missing)
    monkeypatch.setenv("PATH", str(tmp_path / "tools"))
    return tmp_path / "tools"


@pytest.mark.parametrize(
    ("vendor", "tool", "prints", "kind"),
    [
        (Vendor.AMD, "amd-smi", amd_smi((0, 1, "XGMI", "ENABLED")), LinkKind.XGMI),
        (Vendor.AMD, "rocm-smi", ROCM, LinkKind.XGMI),
    ],
)
def test_tools_are_asked_without_a_library(vendor: Vendor, tool: str, prints: str, kind: LinkKind, tools: Path) -> None:
    install(tools, tool, prints)
    assert read_local_links(cards(vendor, 2), tools.parent).kind("G0", "G1") is kind


def test_a_tool_that_prints_no_links_leaves_those_of_the_kernel(tools: Path, tmp_path: Path) -> None:
    install(tools, "amd-smi", "No devices were found")
    buses = [plug_in(tmp_path, f"pci0000:3a/0000:3a:0{number}.0/0000:3{number}:00.0") for number in range(2)]
    found = read_local_links([card(number, bus, Vendor.AMD) for number, bus in enumerate(buses)], tmp_path)
    assert kinds(found) == {"01": LinkKind.HOST_BRIDGE}
