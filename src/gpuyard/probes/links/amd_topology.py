"""Links between AMD cards: `amd-smi topology --json`, and `rocm-smi --showtopo` where it is not installed.

Both say which pairs are joined by XGMI. Their "PCIE" says only that a pair is not: what two cards share on PCIe is read
from the kernel (`pci_tree`).
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from gpuyard.core.snapshot import Device
from gpuyard.core.topology import Link, LinkKind, Topology
from gpuyard.errors import ProbeGarbled, ProbeMissing
from gpuyard.probes.common.device_ids import pci_bus_id
from gpuyard.probes.common.probe_calls import Deadline, run_until

AMD_SMI, ROCM_SMI = "amd-smi", "rocm-smi"
_XGMI = "XGMI"
_TITLE = re.compile(r"=+ *(.*?) *=+")
_TYPES = "Link Type between two GPUs"
_CARD = re.compile(r"GPU(\d{1,4})", re.ASCII)
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
