"""Which vendors' GPUs the PCI bus shows, whether or not any probe can read them (Linux only)."""

from pathlib import Path

from gpuyard.core.model import Vendor

_VENDORS = {"0x10de": Vendor.NVIDIA, "0x1002": Vendor.AMD, "0x8086": Vendor.INTEL}
_GPU_CLASSES = ("0x03", "0x12")  # display controllers, processing accelerators


def gpus_on_pci(root: Path = Path("/")) -> dict[str, Vendor]:
    """Vendors by bus id."""
    found = {}
    try:
        slots = sorted((root / "sys/bus/pci/devices").iterdir())
    except OSError:
        return {}
    for slot in slots:
        vendor = _VENDORS.get(_read(slot / "vendor"))
        if vendor and _read(slot / "class").startswith(_GPU_CLASSES):
            found[slot.name] = vendor
    return found


def vendors_on_pci(root: Path = Path("/")) -> frozenset[Vendor]:
    return frozenset(gpus_on_pci(root).values())


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
