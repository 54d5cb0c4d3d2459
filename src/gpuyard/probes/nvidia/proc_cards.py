"""NVIDIA cards as the kernel module lists them under /proc: enough to identify a card that no longer answers."""

from pathlib import Path

from msgspec import Struct

from gpuyard.probes.common.device_ids import pci_bus_id
from gpuyard.probes.common.kernel_files import read_text
from gpuyard.probes.common.parse_numbers import words


class KernelCard(Struct, frozen=True, kw_only=True):
    pci_bus_id: str | None
    uuid: str | None = None
    name: str | None = None


def list_kernel_cards(root: Path = Path("/")) -> tuple[KernelCard, ...]:
    """Return the cards in PCI bus order, which is NVIDIA's numbering."""
    folder = root / "proc/driver/nvidia/gpus"
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return ()
    return tuple(_read_card(folder / name) for name in names)


def _read_card(folder: Path) -> KernelCard:
    lines = (read_text(folder / "information") or "").splitlines()
    facts = {key.strip(): words(value) for key, _, value in (line.partition(":") for line in lines)}
    uuid = facts.get("GPU UUID")
    return KernelCard(
        pci_bus_id=pci_bus_id(folder.name),
        # A card that was never initialised has question marks in its UUID.
        uuid=None if not uuid or "?" in uuid else uuid,
        name=facts.get("Model"),
    )
