"""What NVIDIA's kernel module says of its cards under /proc: enough to name one that no longer answers."""

from pathlib import Path

from msgspec import Struct

from gpuyard.probes.figures import words


class KernelCard(Struct, frozen=True, kw_only=True):
    pci_bus_id: str | None
    uuid: str | None = None
    name: str | None = None


def list_kernel_cards(root: Path = Path("/")) -> tuple[KernelCard, ...]:
    """In the order of their PCI bus ids, which is how NVIDIA numbers them."""
    folder = root / "proc/driver/nvidia/gpus"
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return ()
    return tuple(_read_card(folder / name) for name in names)


def _read_card(folder: Path) -> KernelCard:
    bus_id = normalize_bus_id(folder.name)
    try:
        text = (folder / "information").read_text(errors="replace")
    except OSError:
        return KernelCard(pci_bus_id=bus_id)
    facts = {key.strip(): words(value) for key, _, value in (line.partition(":") for line in text.splitlines())}
    uuid = facts.get("GPU UUID")
    # A card that never came up has question marks in place of its UUID's digits.
    return KernelCard(pci_bus_id=bus_id, uuid=None if not uuid or "?" in uuid else uuid, name=facts.get("Model"))


def normalize_bus_id(text: str) -> str:
    """As NVML writes it: an eight-digit domain and capitals."""
    domain, _, rest = text.strip().partition(":")
    return f"{domain:0>8}:{rest}".upper()
