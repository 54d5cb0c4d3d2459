"""Intel cards known to the kernel, from files under `/sys/class/drm` that never touch the hardware.

Rules:
- Cards are numbered in the order of their PCI bus ids: the numbers in `card0`, `card1` change from boot to boot.
- Integrated graphics sit at 0000:00:02.0 on every machine, and have no memory of their own.
- Total memory is known from xe, and from Intel's own builds of i915.
"""

import os
import re
from pathlib import Path

from msgspec import Struct, structs

from gpuyard.probes.common import parse_numbers
from gpuyard.probes.common.device_ids import pci_bus_id
from gpuyard.probes.common.kernel_files import read_text
from gpuyard.probes.intel.device_naming import device_id

_NODE = re.compile(r"card\d+", re.ASCII)
_INTEL = "0x8086"
_DRIVERS = frozenset({"i915", "xe"})
_INTEGRATED = "0000:00:02.0"
_NAMES = {
    "0bd5": "Intel Data Center GPU Max 1550",
    "0bda": "Intel Data Center GPU Max 1100",
    "4905": "Intel Iris Xe MAX Graphics",
    "5690": "Intel Arc A770M Graphics",
    "5691": "Intel Arc A730M Graphics",
    "5692": "Intel Arc A550M Graphics",
    "5693": "Intel Arc A370M Graphics",
    "5694": "Intel Arc A350M Graphics",
    "56a0": "Intel Arc A770 Graphics",
    "56a1": "Intel Arc A750 Graphics",
    "56a2": "Intel Arc A580 Graphics",
    "56a5": "Intel Arc A380 Graphics",
    "56a6": "Intel Arc A310 Graphics",
    "56c0": "Intel Data Center GPU Flex 170",
    "56c1": "Intel Data Center GPU Flex 140",
    "e20b": "Intel Arc B580 Graphics",
    "e20c": "Intel Arc B570 Graphics",
}


class IntelCard(Struct, frozen=True, kw_only=True):
    """An Intel card. `folder` is its directory in the tree of PCI devices."""

    folder: Path
    driver: str
    name: str
    index: int = 0
    bus_id: str | None = None
    memory_total_mb: float | None = None

    @property
    def id(self) -> str:
        return device_id(self.index, None, self.bus_id)


def list_cards(root: Path = Path("/")) -> tuple[IntelCard, ...]:
    """Return the cards in PCI bus order; cards without a bus id come last."""
    found = {card.folder: card for node in _nodes(root) if (card := _card(node)) is not None}
    ordered = sorted(found.values(), key=lambda card: (card.bus_id is None, card.bus_id or "", card.folder))
    return tuple(structs.replace(card, index=index) for index, card in enumerate(ordered))


def find_files(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def _nodes(root: Path) -> list[Path]:
    return [node for node in find_files(root / "sys/class/drm", "card*") if _NODE.fullmatch(node.name)]


def _card(node: Path) -> IntelCard | None:
    folder = Path(os.path.realpath(node / "device"))
    driver = _driver(folder)
    if read_text(folder / "vendor") != _INTEL or driver not in _DRIVERS:
        return None
    place = pci_bus_id(_event(folder, "PCI_SLOT_NAME")) or pci_bus_id(folder.name)
    model = (read_text(folder / "device") or "0x?").removeprefix("0x").lower()
    return IntelCard(
        folder=folder,
        driver=driver,
        name=_NAMES.get(model, f"Intel Graphics [{model}]"),
        bus_id=place,
        memory_total_mb=None if place == _INTEGRATED else _total_memory(node, folder),
    )


def _driver(folder: Path) -> str:
    link = folder / "driver"
    return os.path.basename(os.path.realpath(link)) if os.path.islink(link) else _event(folder, "DRIVER") or ""


def _event(folder: Path, key: str) -> str | None:
    lines = (read_text(folder / "uevent") or "").splitlines()
    return next((line.partition("=")[2] for line in lines if line.startswith(f"{key}=")), None)


def _total_memory(node: Path, folder: Path) -> float | None:
    """Return total memory: xe reports it per tile, Intel's builds of i915 per card, the mainline i915 not at all."""
    tiles = find_files(folder, "tile*/physical_vram_size_bytes")
    for files in (tiles, [node / "lmem_total_bytes"], [folder / "lmem_total_bytes"]):
        sizes = [parse_numbers.megabytes(read_text(file), "B") for file in files]
        known = [size for size in sizes if size]
        if known and len(known) == len(sizes):
            return round(sum(known), 2)
    return None
