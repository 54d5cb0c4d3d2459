"""GPUs on the PCI bus by vendor, whether or not a probe can read them (Linux only)."""

from pathlib import Path

from gpuyard.core.snapshot import Vendor
from gpuyard.probes.common.kernel_files import read_text

_VENDORS = {"0x10de": Vendor.NVIDIA, "0x1002": Vendor.AMD, "0x8086": Vendor.INTEL}
_DISPLAYS = ("0x03",)
_DISPLAYS_AND_ACCELERATORS = ("0x03", "0x12")
# Intel's accelerators are NPUs and FPGAs; its GPUs have the display class, even those without a display output.
_GPU_CLASSES = {
    Vendor.NVIDIA: _DISPLAYS_AND_ACCELERATORS,
    Vendor.AMD: _DISPLAYS_AND_ACCELERATORS,
    Vendor.INTEL: _DISPLAYS,
}


def gpus_on_pci(root: Path = Path("/")) -> dict[str, Vendor]:
    """Return the vendor of each GPU by PCI bus id."""
    found = {}
    try:
        slots = sorted((root / "sys/bus/pci/devices").iterdir())
    except OSError:
        return {}
    for slot in slots:
        vendor = _VENDORS.get(read_text(slot / "vendor") or "")
        if vendor and (read_text(slot / "class") or "").startswith(_GPU_CLASSES[vendor]):
            found[slot.name] = vendor
    return found


def vendors_on_pci(root: Path = Path("/")) -> frozenset[Vendor]:
    return frozenset(gpus_on_pci(root).values())
