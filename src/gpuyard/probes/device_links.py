"""How devices are linked: read once, and again when the set of healthy devices changes; never with each sample.

The kernel's tree of PCI devices is read for all vendors: two devices below a common bridge share a PCIe switch, below
the same root only, a host bridge. A vendor's own source is preferred where both know a link:
- NVML counts NVLinks. A link to another card counts for this pair. Links to an NVSwitch join all cards that have some:
  such a pair has as many as the card with fewer, unless the driver denies that the two reach each other.
- `amd-smi topology --json`, or `rocm-smi --showtopo` where it is not installed, says which pairs XGMI joins. Their
  "PCIE" says only that a pair is not joined.

If a source fails, what it would have said is unknown."""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import msgspec

from gpuyard.errors import ProbeCrashed, ProbeError, ProbeGarbled, ProbeMissing
from gpuyard.model.machine_snapshot import Device, Vendor
from gpuyard.model.topology import Link, LinkKind, Topology, link_by_nodes, merge
from gpuyard.probes.devices_and_processes import pci_bus_id
from gpuyard.probes.kernel_files import node_of
from gpuyard.probes.nvidia.nvml import import_nvml
from gpuyard.probes.run_tool import Deadline, run_until
from gpuyard.system.worker_threads import NoAnswerYet, WorkerThread

_PCI_ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", re.ASCII)
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
    found = read_pci_tree(devices, root)
    for vendor, read in ((Vendor.NVIDIA, _read_nvml), (Vendor.AMD, _read_amd)):
        cards = [device for device in devices if device.vendor is vendor and device.parent is None]
        if len(cards) > 1:
            with contextlib.suppress(ProbeError):
                found = merge(found, read(cards))
    return found


def _read_amd(cards: Sequence[Device]) -> Topology:
    # A first answer of a slow tool may come after the snapshot that asked for it; it is used from then on.
    deadline = Deadline(30.0)
    try:
        return parse_amd_smi(run_until(("amd-smi", "topology", "--json"), deadline).require_success(), cards)
    except ProbeMissing:
        return parse_rocm_smi(run_until(("rocm-smi", "--showtopo"), deadline).require_success(), cards)


# The kernel's tree


def read_pci_tree(devices: Sequence[Device], root: Path = Path("/")) -> Topology:
    """Return what the kernel says about these devices. Parts of a card have the node of their card, and no links."""
    nodes = {device.id: node for device in devices if (node := node_of(device, root)) is not None}
    cards = [device for device in devices if device.parent is None]
    paths = {device.id: path for device in cards if (path := _path(device, root)) is not None}
    links = []
    for one, other in combinations(paths, 2):
        at, there = paths[one], paths[other]
        if at[0] == there[0]:
            is_switch = len(at) > 1 and at[1:2] == there[1:2]
            kind = LinkKind.PCIE_SWITCH if is_switch else LinkKind.HOST_BRIDGE
            links.append(Link(one=one, other=other, kind=kind))
    by_node = Topology(links=tuple(link_by_nodes([card.id for card in cards], nodes)), nodes=nodes)
    return merge(by_node, Topology(links=tuple(links)))


def _path(device: Device, root: Path) -> tuple[str, ...] | None:
    """Return the device's root and the bridges above it, such as ("pci0000:3a", "0000:3a:00.0")."""
    if device.pci_bus_id is None:
        return None
    try:
        parts = (root / "sys/bus/pci/devices" / device.pci_bus_id).resolve(strict=True).parts
    except (OSError, RuntimeError):
        return None
    first = next((place for place, part in enumerate(parts) if _PCI_ROOT.fullmatch(part)), None)
    return None if first is None else parts[first:-1]


# NVML


class _LinkedCard(NamedTuple):
    """`to_cards` is the number of NVLinks by the bus id of the card at the other end."""

    device: Device
    handle: Any
    to_cards: Counter[str | None]
    to_switches: int


def _read_nvml(devices: Sequence[Device]) -> Topology:
    """Return the links between these NVIDIA cards. Raises ProbeError if NVML cannot be used."""
    nvml = import_nvml()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise ProbeCrashed("nvml", f"NVML says: {error}") from error
    try:
        cards = [card for device in devices if (card := _read_card(nvml, device)) is not None]
        return Topology(links=tuple(_nvml_links(nvml, cards)))
    finally:
        with contextlib.suppress(nvml.NVMLError):  # the probe that initialised it first has closed it
            nvml.nvmlShutdown()


def _read_card(nvml: ModuleType, device: Device) -> _LinkedCard | None:
    handle = _ask(nvml, "nvmlDeviceGetHandleByPciBusId", device.pci_bus_id)
    if handle is None:
        return None
    to_cards: Counter[str | None] = Counter()
    to_switches = 0
    for number in range(nvml.NVML_NVLINK_MAX_LINKS):
        state = _ask(nvml, "nvmlDeviceGetNvLinkState", handle, number)
        if state is None:
            break  # the card has no more
        if state != nvml.NVML_FEATURE_ENABLED:
            continue
        if _ask(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, number) == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            to_switches += 1
        elif (remote := _ask(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, number)) is not None:
            bus_id = remote.busId
            to_cards[pci_bus_id(bus_id.decode("utf-8", "replace") if isinstance(bus_id, bytes) else bus_id)] += 1
    return _LinkedCard(device, handle, to_cards, to_switches)


def _nvml_links(nvml: ModuleType, cards: Sequence[_LinkedCard]) -> Iterator[Link]:
    shared = dict.fromkeys((0, 10, 20), LinkKind.PCIE_SWITCH)  # 0: two processors on one board
    shared |= {30: LinkKind.HOST_BRIDGE, 40: LinkKind.SAME_NODE, 50: LinkKind.ACROSS_NODES}
    for one, other in combinations(cards, 2):
        pair, ids = (one.handle, other.handle), (one.device.id, other.device.id)
        count = one.to_cards[other.device.pci_bus_id]
        if not count and (by_switches := min(one.to_switches, other.to_switches)):
            status = _ask(nvml, "nvmlDeviceGetP2PStatus", *pair, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            count = by_switches if status in (None, nvml.NVML_P2P_STATUS_OK) else 0
        if count:
            yield Link(one=ids[0], other=ids[1], kind=LinkKind.NVLINK, count=count)
        elif kind := shared.get(_ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", *pair)):
            yield Link(one=ids[0], other=ids[1], kind=kind)


def _ask(nvml: ModuleType, function: str, *arguments: Any) -> Any:
    """Return the driver's answer, or None if it has none, or if the driver or the package lacks the function."""
    call = getattr(nvml, function, None)
    try:
        return None if call is None else call(*arguments)
    except nvml.NVMLError:
        return None


# What tools print


def _find(devices: Sequence[Device], index: object, bus_id: object = None) -> str | None:
    """Return the id of a card by its bus id, where a tool gives it, or by its number."""
    bus = pci_bus_id(bus_id)
    for card in devices:
        is_it = card.pci_bus_id == bus if bus else isinstance(index, int) and card.index == index
        if is_it and card.parent is None:
            return card.id
    return None


def parse_amd_smi(text: str, devices: Sequence[Device]) -> Topology:
    """Read a list of cards, each with its links to all; some releases put the list into an object."""
    try:
        content = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProbeGarbled("amd-smi", "`topology` prints no JSON") from error
    if isinstance(content, dict):
        content = next((each for each in content.values() if isinstance(each, list)), None)
    if not isinstance(content, list):
        raise ProbeGarbled("amd-smi", "`topology` prints no list of GPUs")
    found = []
    for card in (card for card in content if isinstance(card, dict)):
        one, links = _find(devices, card.get("gpu"), card.get("bdf")), card.get("links")
        for link in links if isinstance(links, list) and one is not None else ():
            if isinstance(link, dict) and link.get("link_type") == "XGMI" and link.get("link_status") != "DISABLED":
                other = _find(devices, link.get("gpu"), link.get("bdf"))
                if one is not None and other is not None and one < other:
                    found.append(Link(one=one, other=other, kind=LinkKind.XGMI))
    return Topology(links=tuple(found))


def parse_rocm_smi(text: str, devices: Sequence[Device]) -> Topology:
    sections: dict[str, list[list[str]]] = {}
    rows: list[list[str]] = []
    nodes = {}
    for line in map(str.strip, text.splitlines()):
        if title := re.fullmatch(r"=+ *(.*?) *=+", line):
            rows = sections.setdefault(title[1], [])
        elif line:
            rows.append(line.split())
        node = re.match(r"GPU ?\[?(\d{1,4})\]?\s*: \(Topology\) Numa Node: (\d{1,4})", line, re.ASCII)
        if node and (device_id := _find(devices, int(node[1]))) is not None:
            nodes[device_id] = int(node[2])
    types = sections.get("Link Type between two GPUs")
    if types is None:
        raise ProbeGarbled("rocm-smi", "`--showtopo` prints no types of links")
    # Below a line of columns. Each pair is there twice; one is enough.
    names = {name for row in types for name in row if re.fullmatch(r"GPU\d{1,4}", name, re.ASCII)}
    ids = {name: _find(devices, int(name[3:])) for name in names}
    links = [
        Link(one=one, other=other, kind=LinkKind.XGMI)
        for row in types[1:]
        for column, cell in zip(types[0], row[1:], strict=False)
        if cell == "XGMI" and (one := ids.get(row[0])) and (other := ids.get(column)) and one < other
    ]
    return Topology(links=tuple(links), nodes=nodes)
