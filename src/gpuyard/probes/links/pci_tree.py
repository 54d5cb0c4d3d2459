"""Links and NUMA nodes from the kernel's tree of PCI devices (Linux): for all vendors, without a driver.

- Two devices below a common bridge share a PCIe switch; below the same root only, a host bridge. Devices with different
  roots are on the same NUMA node or not, if both nodes are known.
- The kernel's node -1 is unknown, unless the machine has only one.
"""

import re
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from gpuyard.core.snapshot import Device
from gpuyard.core.topology import Link, LinkKind, Topology, link_by_nodes, merge
from gpuyard.probes.common.kernel_files import read_text

_ONLY_NODE = "0"
_ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", re.ASCII)


def read_pci_tree(devices: Sequence[Device], root: Path = Path("/")) -> Topology:
    """Return what the kernel says about these devices. Parts of a card have the node of their card, and no links."""
    nodes = {device.id: node for device in devices if (node := _node(device, root)) is not None}
    cards = [device for device in devices if device.parent is None]
    paths = {device.id: path for device in cards if (path := _path(device, root)) is not None}
    by_path = (
        Link(one=one, other=other, kind=kind)
        for one, other in combinations(paths, 2)
        if (kind := _shared(paths[one], paths[other])) is not None
    )
    by_node = Topology(links=tuple(link_by_nodes([card.id for card in cards], nodes)), nodes=nodes)
    return merge(by_node, Topology(links=tuple(by_path)))


def _slot(device: Device, root: Path) -> Path | None:
    return None if device.pci_bus_id is None else root / "sys/bus/pci/devices" / device.pci_bus_id


def _node(device: Device, root: Path) -> int | None:
    slot = _slot(device, root)
    text = None if slot is None else read_text(slot / "numa_node")
    if text is None:
        return None
    if text.isascii() and text.isdecimal():
        return int(text)
    return 0 if read_text(root / "sys/devices/system/node/online") == _ONLY_NODE else None


def _path(device: Device, root: Path) -> tuple[str, ...] | None:
    """Return the device's root and the bridges above it, such as ("pci0000:3a", "0000:3a:00.0")."""
    slot = _slot(device, root)
    try:
        parts = () if slot is None else slot.resolve(strict=True).parts
    except (OSError, RuntimeError):
        return None
    first = next((place for place, part in enumerate(parts) if _ROOT.fullmatch(part)), None)
    return None if first is None else parts[first:-1]


def _shared(one: tuple[str, ...], other: tuple[str, ...]) -> LinkKind | None:
    if one[0] != other[0]:
        return None
    return LinkKind.PCIE_SWITCH if len(one) > 1 and one[1:2] == other[1:2] else LinkKind.HOST_BRIDGE
