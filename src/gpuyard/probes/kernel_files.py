"""Small kernel files, which may be missing or unreadable, and the GPUs on the PCI bus (Linux only)."""

import os
from pathlib import Path

from gpuyard.model.machine_snapshot import Vendor

_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # constant in the kernel
_VENDORS = {"0x10de": Vendor.NVIDIA, "0x1002": Vendor.AMD, "0x8086": Vendor.INTEL}
# Displays and accelerators. Intel's accelerators are NPUs and FPGAs; its GPUs are displays, even without an output.
_GPU_CLASSES = {Vendor.NVIDIA: ("0x03", "0x12"), Vendor.AMD: ("0x03", "0x12"), Vendor.INTEL: ("0x03",)}


def read_text(path: Path) -> str | None:
    """Return the stripped text of the file, or None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except (OSError, ValueError):
        return None


def sees_all_processes(root: Path = Path("/")) -> bool:
    """Return whether this process is in the first PID namespace, as outside of containers: its pids are a driver's."""
    try:
        return os.readlink(root / "proc/self/ns/pid") == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def gpus_on_pci(root: Path = Path("/")) -> dict[str, Vendor]:
    """Return the vendor of each GPU by PCI bus id, whether or not a probe can read it."""
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
