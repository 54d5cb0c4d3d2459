"""How the devices of a machine are linked. A link that no probe could read is unknown, and so is the NUMA node of a
device. A part of a card (a MIG instance) has the NUMA node of its card, and unknown links.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from itertools import combinations
from typing import Any, Self

from msgspec import Struct


class LinkKind(StrEnum):
    """The closest thing that two devices share, the best first: with its text in a matrix, and its strength. Each kind
    outweighs any number of weaker links that the GPUs of a machine can have between them."""

    short: str
    strength: int

    def __new__(cls, value: str, short: str, strength: int) -> Self:
        member = str.__new__(cls, value)
        member._value_, member.short, member.strength = value, short, strength
        return member

    NVLINK = "nvlink", "NV", 10**12
    XGMI = "xgmi", "XGMI", 10**12
    PCIE_SWITCH = "pcie-switch", "switch", 10**9
    HOST_BRIDGE = "host-bridge", "bridge", 10**6
    SAME_NODE = "same-node", "node", 10**3
    ACROSS_NODES = "across-nodes", "across", 1
    UNKNOWN = "unknown", "?", 0

    @property
    def is_direct(self) -> bool:
        return self in (LinkKind.NVLINK, LinkKind.XGMI)


class Link(Struct, frozen=True, kw_only=True):
    """The link between two devices, `one` and `other`. `count` is None where it is unknown, or is not a number."""

    one: str
    other: str
    kind: LinkKind
    count: int | None = None

    @property
    def strength(self) -> int:
        return self.kind.strength * (self.count or 1 if self.kind.is_direct else 1)


class Topology(Struct, frozen=True, kw_only=True, dict=True):
    """The links between devices, and the NUMA nodes of devices by id, as far as they are known."""

    links: tuple[Link, ...] = ()
    nodes: Mapping[str, int] = {}

    @cached_property
    def _by_pair(self) -> dict[tuple[str, str], Link]:
        return {pair: link for link in self.links for pair in ((link.one, link.other), (link.other, link.one))}

    @property
    def is_known(self) -> bool:
        """Whether any link or node is known. If none is, no set of devices is better than another."""
        return bool(self.links or self.nodes)

    def kind(self, one: str, other: str) -> LinkKind:
        link = self._by_pair.get((one, other))
        return LinkKind.UNKNOWN if link is None else link.kind

    def link(self, one: str, other: str) -> Link | None:
        return self._by_pair.get((one, other))

    @cached_property
    def _strengths(self) -> dict[tuple[str, str], int]:
        return {pair: link.strength for pair, link in self._by_pair.items()}

    def strength(self, one: str, other: str) -> int:
        return self._strengths.get((one, other), 0)

    def linked_to(self, device_id: str) -> list[str]:
        """Return the devices that are joined to this one by NVLink or XGMI."""
        return [other for (one, other), link in self._by_pair.items() if one == device_id and link.kind.is_direct]

    def joined_groups(self, device_ids: Iterable[str]) -> list[list[str]]:
        """Return the devices in groups within which NVLink or XGMI leads from each to each, the largest first."""
        left = list(device_ids)
        groups = []
        while left:
            group = [left.pop(0)]
            for device_id in group:  # grows while it is read
                joined = [other for other in left if self.kind(device_id, other).is_direct]
                group += joined
                left = [other for other in left if other not in joined]
            groups.append(group)
        return sorted(groups, key=len, reverse=True)

    def node_groups(self, device_ids: Iterable[str]) -> list[list[str]]:
        """Return the devices by NUMA node, the largest group first. A device of unknown node is in none."""
        groups: dict[int, list[str]] = {}
        for device_id in device_ids:
            if device_id in self.nodes:
                groups.setdefault(self.nodes[device_id], []).append(device_id)
        return sorted(groups.values(), key=len, reverse=True)


def merge(base: Topology, better: Topology) -> Topology:
    """Return all links and nodes of both; where both know one, that of `better` counts."""
    pairs = {frozenset((link.one, link.other)): link for link in (*base.links, *better.links)}
    known = (link for link in pairs.values() if link.kind is not LinkKind.UNKNOWN)
    return Topology(links=tuple(known), nodes={**base.nodes, **better.nodes})


def link_by_nodes(device_ids: Sequence[str], nodes: Mapping[str, int]) -> Iterator[Link]:
    """Yield what NUMA nodes say about the links of these devices."""
    for one, other in combinations(device_ids, 2):
        if one in nodes and other in nodes:
            kind = LinkKind.SAME_NODE if nodes[one] == nodes[other] else LinkKind.ACROSS_NODES
            yield Link(one=one, other=other, kind=kind)


def link_text(link: Link | None) -> str:
    """Return the link in a few characters, as a cell of a matrix."""
    if link is None:
        return LinkKind.UNKNOWN.short
    return f"{link.kind.short}{link.count if link.kind is LinkKind.NVLINK and link.count else ''}"


def topology_as_dict(topology: Topology, device_ids: Collection[str]) -> dict[str, Any]:
    """Return the topology for JSON: a NUMA node for each device, and a link for each pair; unknown is null."""
    links = []
    for one, other in combinations(device_ids, 2):
        link = topology.link(one, other)
        kind = None if link is None else str(link.kind)
        links.append({"one": one, "other": other, "kind": kind, "count": link and link.count})
    return {"nodes": {each: topology.nodes.get(each) for each in device_ids}, "links": links}
