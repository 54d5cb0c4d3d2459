"""`nvidia-smi topo -m`: the links between NVIDIA cards as a matrix, for machines where NVML cannot be used.

The header names the columns: cards, then network adapters, then affinities. It is underlined with escape sequences even
in a file, and its columns do not line up with those below, so cells are counted and not measured.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

from gpuyard.core.snapshot import Device
from gpuyard.core.topology import Link, LinkKind, Topology
from gpuyard.errors import ProbeGarbled
from gpuyard.probes.common.probe_calls import Deadline, run_until

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
