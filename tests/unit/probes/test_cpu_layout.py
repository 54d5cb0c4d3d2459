"""CPUs and NUMA nodes, on trees built in a folder."""

import os
from pathlib import Path

import pytest

from gpuyard.model.machine_snapshot import Device, Vendor
from gpuyard.policy.host_room import CpuLayout
from gpuyard.probes.kernel_files import node_of, read_cpu_layout


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(f"{text}\n")


def card(bus_id: str | None) -> Device:
    return Device(id="G0", vendor=Vendor.NVIDIA, pci_bus_id=bus_id)


def test_only_cpus_that_this_process_may_use_count_by_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 3, 8, 9}, raising=False)
    write(tmp_path, "sys/devices/system/node/node0/cpulist", "0-3")
    write(tmp_path, "sys/devices/system/node/node1/cpulist", "4-7")
    write(tmp_path, "sys/devices/system/node/node10/cpulist", "8")
    expected = CpuLayout(allowed=frozenset({1, 2, 3, 8, 9}), nodes={0: frozenset({1, 2, 3}), 10: frozenset({8})})
    assert read_cpu_layout(tmp_path) == expected
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert read_cpu_layout(tmp_path / "nothing") == CpuLayout(allowed=frozenset({0, 1}))


def test_the_node_of_a_card_is_that_of_its_bus_id_or_unknown(tmp_path: Path) -> None:
    write(tmp_path, "sys/bus/pci/devices/0000:3b:00.0/numa_node", "1")
    write(tmp_path, "sys/bus/pci/devices/0000:5e:00.0/numa_node", "-1")
    assert node_of(card("00000000:3B:00.0"), tmp_path) == 1
    assert node_of(card("0000:5e:00.0"), tmp_path) is None
    assert node_of(card("0000:af:00.0"), tmp_path) is None
    assert node_of(card(None), tmp_path) is None
