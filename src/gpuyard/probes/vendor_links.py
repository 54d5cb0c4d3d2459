"""Links between cards as a vendor's library or tool reports them.

- NVML counts NVLinks. A link to another card counts for this pair. Links to an NVSwitch join all cards that have some:
  such a pair has as many as the card with fewer, unless the driver denies that the two reach each other.
- `nvidia-smi topo -m`, where NVML cannot be used, prints a matrix. Its header is underlined with escape sequences even
  in a file, and its columns do not line up with those below, so cells are counted and not measured.
- `amd-smi topology --json`, or `rocm-smi --showtopo` where it is not installed, says which pairs XGMI joins. Their
  "PCIE" says only that a pair is not joined.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from types import ModuleType
from typing import Any

import msgspec
from msgspec import Struct

from gpuyard.errors import ProbeCrashed, ProbeGarbled, ProbeMissing
from gpuyard.model.machine_snapshot import Device
from gpuyard.model.topology import Link, LinkKind, Topology
from gpuyard.probes.devices_and_processes import pci_bus_id
from gpuyard.probes.nvidia.nvml import import_nvml
from gpuyard.probes.run_tool import Deadline, run_until

_SHARED = {
    0: LinkKind.PCIE_SWITCH,  # two processors on one board
    10: LinkKind.PCIE_SWITCH,
    20: LinkKind.PCIE_SWITCH,
    30: LinkKind.HOST_BRIDGE,
    40: LinkKind.SAME_NODE,
    50: LinkKind.ACROSS_NODES,
}


class _LinkedCard(Struct, frozen=True, kw_only=True):
    """`to_cards` is the number of NVLinks by the bus id of the card at the other end."""

    device: Device
    handle: Any
    to_cards: Counter[str | None]
    to_switches: int


def read_nvml_links(devices: Sequence[Device]) -> Topology:
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
            to_cards[pci_bus_id(_text(remote.busId))] += 1
    return _LinkedCard(device=device, handle=handle, to_cards=to_cards, to_switches=to_switches)


def _nvml_links(nvml: ModuleType, cards: Sequence[_LinkedCard]) -> Iterator[Link]:
    for one, other in combinations(cards, 2):
        count = one.to_cards[other.device.pci_bus_id] or _switched(nvml, one, other)
        kind = LinkKind.NVLINK if count else None
        if kind is None:
            shared = _ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", one.handle, other.handle)
            kind = _SHARED.get(shared)
        if kind is not None:
            yield Link(one=one.device.id, other=other.device.id, kind=kind, count=count or None)


def _switched(nvml: ModuleType, one: _LinkedCard, other: _LinkedCard) -> int:
    """Return the number of links through NVSwitches."""
    count = min(one.to_switches, other.to_switches)
    if not count:
        return 0
    status = _ask(nvml, "nvmlDeviceGetP2PStatus", one.handle, other.handle, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    return count if status in (None, nvml.NVML_P2P_STATUS_OK) else 0


def _ask(nvml: ModuleType, function: str, *arguments: Any) -> Any:
    """Return the driver's answer, or None if it has none, or if the driver or the package lacks the function."""
    call = getattr(nvml, function, None)
    try:
        return None if call is None else call(*arguments)
    except nvml.NVMLError:
        return None


def _text(raw: str | bytes) -> str:
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw


NAME = "nvidia-smi"
_COMMAND = (NAME, "topo", "-m")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_CARD = re.compile(r"GPU(\d{1,4})", re.ASCII)
_NVLINKS = re.compile(r"NV(\d{1,3})", re.ASCII)
_WORDS = {
    "PIX": LinkKind.PCIE_SWITCH,
    "PXB": LinkKind.PCIE_SWITCH,
    "PSB": LinkKind.PCIE_SWITCH,
    "PHB": LinkKind.HOST_BRIDGE,
    "NODE": LinkKind.SAME_NODE,
    "SOC": LinkKind.ACROSS_NODES,  # as releases before 384 call it
    "SYS": LinkKind.ACROSS_NODES,
}


def read_nvidia_smi_topo(devices: Sequence[Device], timeout_s: float) -> Topology:
    return parse_topo(run_until(_COMMAND, Deadline(timeout_s)).require_success(), devices)


def parse_topo(text: str, devices: Sequence[Device]) -> Topology:
    """Return the links of these devices, which the output calls by their numbers. Raises ProbeGarbled."""
    lines = _ESCAPES.sub("", text).splitlines()
    header = next((line for line in lines if _CARD.search(line)), None)
    if header is None:
        raise ProbeGarbled(NAME, "`topo -m` prints no matrix of GPUs")
    columns = header.partition("CPU Affinity")[0].split()
    ids = {device.index: device.id for device in devices if device.parent is None}
    rows = [line.split() for line in lines[lines.index(header) + 1 :]]
    named = [(ids.get(int(match[1])), row[1:]) for row in rows if row and (match := _CARD.fullmatch(row[0]))]
    links: list[Link] = []
    nodes: dict[str, int] = {}
    for one, cells in named:
        if one is None:
            continue
        links += _links(one, zip(columns, cells, strict=False), ids)
        node = _node(cells[len(columns) :], has_nodes="NUMA Affinity" in header)
        if node is not None:
            nodes[one] = node
    return Topology(links=tuple(links), nodes=nodes)


def _links(one: str, cells: Iterable[tuple[str, str]], ids: dict[int | None, str]) -> Iterator[Link]:
    """Yield the links to cards of other columns. Each pair is there twice; the first one found is enough."""
    for column, cell in cells:
        match = _CARD.fullmatch(column)
        other = ids.get(int(match[1])) if match else None
        if other is None or other <= one:
            continue
        nvlinks = _NVLINKS.fullmatch(cell)
        kind = LinkKind.NVLINK if nvlinks else _WORDS.get(cell)
        if kind is not None:
            yield Link(one=one, other=other, kind=kind, count=int(nvlinks[1]) if nvlinks else None)


def _node(affinities: Sequence[str], *, has_nodes: bool) -> int | None:
    """Return the NUMA node: the column after that of CPUs. A list of nodes is no node."""
    text = affinities[1] if has_nodes and len(affinities) > 1 else ""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 5 else None


AMD_SMI, ROCM_SMI = "amd-smi", "rocm-smi"
_XGMI = "XGMI"
_TITLE = re.compile(r"=+ *(.*?) *=+")
_TYPES = "Link Type between two GPUs"
_NODE = re.compile(r"GPU ?\[?(\d{1,4})\]?\s*: \(Topology\) Numa Node: (\d{1,4})", re.ASCII)


def read_amd_links(devices: Sequence[Device], timeout_s: float) -> Topology:
    """Return the links of these AMD cards. Raises ProbeError if neither tool can say."""
    deadline = Deadline(timeout_s)
    try:
        return parse_amd_smi(run_until((AMD_SMI, "topology", "--json"), deadline).require_success(), devices)
    except ProbeMissing:
        return parse_rocm_smi(run_until((ROCM_SMI, "--showtopo"), deadline).require_success(), devices)


def parse_amd_smi(text: str, devices: Sequence[Device]) -> Topology:
    """Read a list of cards, each with its links to all; some releases put the list into an object."""
    try:
        content = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProbeGarbled(AMD_SMI, "`topology` prints no JSON") from error
    if isinstance(content, dict):
        content = next((each for each in content.values() if isinstance(each, list)), None)
    if not isinstance(content, list):
        raise ProbeGarbled(AMD_SMI, "`topology` prints no list of GPUs")
    cards = [card for card in content if isinstance(card, dict)]
    ids = _Ids(devices)
    return Topology(links=tuple(link for card in cards for link in _amd_smi_links(card, ids)))


def parse_rocm_smi(text: str, devices: Sequence[Device]) -> Topology:
    """Read the section of link types and that of NUMA nodes."""
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        title = _TITLE.fullmatch(line.strip())
        if title is None:
            lines.append(line)
        else:
            lines = sections.setdefault(title[1], [])
    if _TYPES not in sections:
        raise ProbeGarbled(ROCM_SMI, "`--showtopo` prints no types of links")
    ids = _Ids(devices)
    found = (match for line in text.splitlines() if (match := _NODE.match(line.strip())))
    nodes = {device_id: int(match[2]) for match in found if (device_id := ids.find(int(match[1]))) is not None}
    return Topology(links=tuple(_rocm_smi_links(sections[_TYPES], ids)), nodes=nodes)


class _Ids:
    """The ids of cards by number, and by bus id where a tool gives it."""

    def __init__(self, devices: Sequence[Device]) -> None:
        cards = [device for device in devices if device.parent is None]
        self._by_index = {card.index: card.id for card in cards}
        self._by_bus = {card.pci_bus_id: card.id for card in cards if card.pci_bus_id is not None}

    def find(self, index: object, bus_id: object = None) -> str | None:
        bus = pci_bus_id(bus_id)
        if bus is not None:
            return self._by_bus.get(bus)
        return self._by_index.get(index) if isinstance(index, int) else None


def _amd_smi_links(card: dict[str, Any], ids: _Ids) -> Iterator[Link]:
    one, links = ids.find(card.get("gpu"), card.get("bdf")), card.get("links")
    for link in links if isinstance(links, list) else ():
        if not isinstance(link, dict) or link.get("link_type") != _XGMI or link.get("link_status") == "DISABLED":
            continue
        other = ids.find(link.get("gpu"), link.get("bdf"))
        if one is not None and other is not None and one < other:
            yield Link(one=one, other=other, kind=LinkKind.XGMI)


def _rocm_smi_links(lines: Sequence[str], ids: _Ids) -> Iterator[Link]:
    rows = [line.split() for line in lines if line.strip()]
    columns = rows[0] if rows else []
    for row in rows[1:]:
        one = _number(row[0], ids)
        for column, cell in zip(columns, row[1:], strict=False):
            other = _number(column, ids)
            if cell == _XGMI and one is not None and other is not None and one < other:
                yield Link(one=one, other=other, kind=LinkKind.XGMI)


def _number(name: str, ids: _Ids) -> str | None:
    match = _CARD.fullmatch(name)
    return ids.find(int(match[1])) if match else None
