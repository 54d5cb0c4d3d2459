"""How devices are linked: read once, and again when the set of healthy devices changes; never with each sample.

The kernel's tree of PCI devices is read for all vendors: two devices below a common bridge share a PCIe switch, below
the same root only, a host bridge. The kernel's node -1 is unknown, unless the machine has only one. Then a vendor's own
source is read (`vendor_links`), which knows NVLink or XGMI and is preferred where both know a link. If a source fails,
what it would have said is unknown; the vendor's probe reports why a driver cannot be read.
"""

import contextlib
import re
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import TypeAlias

from gpuyard.errors import ProbeError
from gpuyard.model.machine_snapshot import Device, Vendor
from gpuyard.model.topology import Link, LinkKind, Topology, link_by_nodes, merge
from gpuyard.probes.kernel_files import read_text
from gpuyard.system.worker_threads import NoAnswerYet, WorkerThread

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


# A first answer of a slow tool may come after the snapshot that asked for it; it is used from then on.
_LONGEST_S = 30.0

ReadLinks: TypeAlias = Callable[[Sequence[Device]], Topology]


class LinkReader:
    """Keeps the topology of the last set of devices. `read` is called in a thread of its own, as drivers may hang."""

    def __init__(self, read: ReadLinks) -> None:
        self._read = read
        self._worker: WorkerThread[Topology] = WorkerThread("gpuyard-links")
        self._seen: frozenset[tuple[str, str | None]] = frozenset()
        self._topology = Topology()
        self._is_late = False

    def topology(self, devices: Sequence[Device], timeout_s: float) -> Topology:
        """Return the topology of these devices, waiting up to `timeout_s` for a new one; unknown until it is read."""
        healthy = [device for device in devices if device.healthy]
        seen = frozenset((device.id, device.pci_bus_id) for device in healthy)
        if seen != self._seen and self._worker.start(lambda: self._read(healthy)):
            self._seen, self._topology, self._is_late = seen, Topology(), True
        elif self._is_late:
            timeout_s = 0.0
        if self._is_late:
            with contextlib.suppress(NoAnswerYet):
                self._topology = self._worker.finish(timeout_s)
                self._is_late = False
        return self._topology


def read_local_links(devices: Sequence[Device], root: Path = Path("/")) -> Topology:
    """Return the links between the real devices of this machine."""
    found = read_pci_tree(devices, root)
    for vendor, read in ((Vendor.NVIDIA, _read_nvidia), (Vendor.AMD, _read_amd)):
        cards = [device for device in devices if device.vendor is vendor and device.parent is None]
        if len(cards) > 1:
            with contextlib.suppress(ProbeError):
                found = merge(found, read(cards))
    return found


def _read_nvidia(cards: Sequence[Device]) -> Topology:
    from gpuyard.probes.vendor_links import read_nvidia_smi_topo, read_nvml_links

    try:
        return read_nvml_links(cards)
    except ProbeError:
        return read_nvidia_smi_topo(cards, _LONGEST_S)


def _read_amd(cards: Sequence[Device]) -> Topology:
    from gpuyard.probes.vendor_links import read_amd_links

    return read_amd_links(cards, _LONGEST_S)
