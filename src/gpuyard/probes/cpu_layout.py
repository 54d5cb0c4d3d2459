"""The CPUs of this machine by NUMA node, and the nodes of its GPUs, as Linux lists them. Unknown is unknown."""

import os
from pathlib import Path

from gpuyard.model.machine_snapshot import Device
from gpuyard.policy.host_room import CpuLayout, parse_cpus
from gpuyard.probes.devices_and_processes import pci_bus_id
from gpuyard.probes.kernel_files import read_text

_ROOT = Path("/")


def read_cpu_layout(root: Path = _ROOT) -> CpuLayout:
    """Return the CPUs that this process may use, and their nodes; no CPUs on systems other than Linux."""
    if not hasattr(os, "sched_getaffinity"):  # macOS has none
        return CpuLayout()
    allowed = frozenset(os.sched_getaffinity(0))
    nodes = {}
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        cpus = parse_cpus(read_text(folder / "cpulist")) & allowed
        if cpus and folder.name[4:].isdecimal():
            nodes[int(folder.name[4:])] = cpus
    return CpuLayout(allowed=allowed, nodes=nodes)


def node_of(device: Device, root: Path = _ROOT) -> int | None:
    """Return the NUMA node of a GPU; None where the kernel does not say."""
    bus_id = pci_bus_id(device.pci_bus_id)
    text = None if bus_id is None else read_text(root / "sys/bus/pci/devices" / bus_id / "numa_node")
    return int(text) if text is not None and text.isdecimal() else None  # -1 on machines without nodes
