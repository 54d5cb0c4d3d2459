"""Read how devices are linked: once, and again when the set of healthy devices changes; never with each sample.

The kernel's PCI tree is read for all vendors, then a vendor's own source, which knows NVLink or XGMI and is preferred
where both know a link: NVML, else `nvidia-smi topo -m`; `amd-smi topology`, else `rocm-smi --showtopo`. If a source
fails, what it would have said is unknown; the vendor's probe reports why a driver cannot be read.
"""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from gpuyard.core.snapshot import Device, Vendor
from gpuyard.core.topology import Topology, merge
from gpuyard.errors import ProbeError
from gpuyard.probes.common.worker_thread import NoAnswerYet, WorkerThread
from gpuyard.probes.links.pci_tree import read_pci_tree

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
    from gpuyard.probes.links.nvidia_smi_topo import read_nvidia_smi_topo
    from gpuyard.probes.links.nvml_links import read_nvml_links

    try:
        return read_nvml_links(cards)
    except ProbeError:
        return read_nvidia_smi_topo(cards, _LONGEST_S)


def _read_amd(cards: Sequence[Device]) -> Topology:
    from gpuyard.probes.links.amd_topology import read_amd_links

    return read_amd_links(cards, _LONGEST_S)
