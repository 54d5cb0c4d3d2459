"""How the GPUs of a machine are linked, as a matrix for people. Pure."""

from gpuyard.core.snapshot import Snapshot
from gpuyard.core.topology import link_text
from gpuyard.core.units import UNKNOWN
from gpuyard.ui.cli.text_table import Column, join_cells, lay_out

_SELF = "X"
_MEANINGS = {
    "NV": "NVLink, and how many",
    "XGMI": "AMD's own link",
    "switch": "a PCIe switch",
    "bridge": "a PCIe host bridge",
    "node": "a NUMA node",
    "across": "across NUMA nodes",
    "?": "unknown",
}


def topology_lines(snapshot: Snapshot) -> list[str]:
    """Return a row for each GPU: its NUMA node, and the best that it shares with each other; then what words mean."""
    devices, topology = snapshot.unsplit_devices(), snapshot.topology
    if not devices:
        return ["No GPU found. `gpuyard doctor` shows what was tried."]
    labels = [snapshot.labels.get(device.id, device.id) for device in devices]
    texts = [
        [_SELF if one is other else link_text(topology.link(one.id, other.id)) for other in devices] for one in devices
    ]
    nodes = [topology.nodes.get(device.id) for device in devices]
    rows = [
        (f"GPU {label}", UNKNOWN if node is None else str(node), *cells)
        for label, node, cells in zip(labels, nodes, texts, strict=True)
    ]
    columns = [Column(""), Column("node", is_right=True), *map(Column, labels)]
    found = {cell for cells in texts for cell in cells}
    meanings = [f"{word}: {meaning}" for word, meaning in _MEANINGS.items() if any(_is(word, each) for each in found)]
    lines = [join_cells(line) for line in lay_out(columns, rows, None)]
    return [*lines, *(["", "; ".join(meanings)] if meanings else [])]


def _is(word: str, cell: str) -> bool:
    return cell.rstrip("0123456789") == word
