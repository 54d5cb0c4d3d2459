"""Ids and processes of Intel devices, the same for every tool, and the cards that the kernel knows.

Rules:
- A device's id is the vendor's UUID, else its PCI bus id such as `0000:03:00.0`, else `intel-<index>`.
- Early drivers give every card of one model the same UUID: such cards are identified by PCI bus id.
- A process is listed once, with the memory of all its clients; one unknown part makes the sum unknown.

Rules for the kernel's files under `/sys/class/drm`, which never touch the hardware:
- Cards are numbered in the order of their PCI bus ids: the numbers in `card0`, `card1` change from boot to boot.
- Integrated graphics sit at 0000:00:02.0 on every machine, and have no memory of their own.
- Total memory is known from xe, and from Intel's own builds of i915.
"""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from gpuyard.model.machine_snapshot import Device, Process
from gpuyard.probes import parse_numbers
from gpuyard.probes.devices_and_processes import one_per_pid, pci_bus_id, with_distinct_ids
from gpuyard.probes.kernel_files import read_text

DRIVERS = frozenset({"i915", "xe"})
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


def device_id(index: int | None, uuid: str | None = None, bus_id: str | None = None) -> str:
    return uuid or bus_id or f"intel-{index or 0}"


def without_shared_uuids(devices: Sequence[Device]) -> tuple[Device, ...]:
    times = Counter(device.id for device in devices)
    return with_distinct_ids(
        structs.replace(device, id=device_id(device.index, None, device.pci_bus_id)) if times[device.id] > 1 else device
        for device in devices
    )


def processes_of(clients: Iterable[Process]) -> tuple[Process, ...]:
    def added(one_mb: float | None, other_mb: float | None) -> float | None:
        return None if one_mb is None or other_mb is None else round(one_mb + other_mb, 2)

    return tuple(sorted(one_per_pid(clients, added), key=lambda process: process.pid))


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

    @property
    def identity(self) -> dict[str, Any]:
        """The fields of a Device that the kernel knows."""
        known = {"id": self.id, "index": self.index, "name": self.name}
        return {**known, "pci_bus_id": self.bus_id, "memory_total_mb": self.memory_total_mb}


def list_cards(root: Path = Path("/")) -> tuple[IntelCard, ...]:
    """Return the cards in PCI bus order; cards without a bus id come last."""
    nodes = (node for node in find_files(root / "sys/class/drm", "card*") if node.name[4:].isdecimal())
    found = {card.folder: card for card in map(_card, nodes) if card is not None}
    ordered = sorted(found.values(), key=lambda card: (card.bus_id is None, card.bus_id or "", card.folder))
    return tuple(structs.replace(card, index=index) for index, card in enumerate(ordered))


def find_files(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def _card(node: Path) -> IntelCard | None:
    folder = Path(os.path.realpath(node / "device"))
    lines = (line.partition("=") for line in (read_text(folder / "uevent") or "").splitlines())
    event, link = {key: value for key, _, value in lines}, folder / "driver"
    driver = os.path.basename(os.path.realpath(link)) if os.path.islink(link) else event.get("DRIVER", "")
    if read_text(folder / "vendor") != "0x8086" or driver not in DRIVERS:
        return None
    place = pci_bus_id(event.get("PCI_SLOT_NAME")) or pci_bus_id(folder.name)
    model = (read_text(folder / "device") or "0x?").removeprefix("0x").lower()
    total_mb = None
    # xe reports it per tile, Intel's builds of i915 per card, the mainline i915 not at all.
    tiles = find_files(folder, "tile*/physical_vram_size_bytes")
    for files in (tiles, [node / "lmem_total_bytes"], [folder / "lmem_total_bytes"]):
        sizes = [parse_numbers.megabytes(read_text(file), "B") or 0.0 for file in files]
        if total_mb is None and sizes and all(sizes) and place != "0000:00:02.0":
            total_mb = round(sum(sizes), 2)
    name = _NAMES.get(model, f"Intel Graphics [{model}]")
    return IntelCard(folder=folder, driver=driver, name=name, bus_id=place, memory_total_mb=total_mb)
