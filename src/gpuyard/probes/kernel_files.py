"""Small kernel files, which may be missing or unreadable; the GPUs on the PCI bus, and the CPUs by NUMA node (Linux
only). Unknown is unknown."""

import os
from pathlib import Path

from gpuyard.model.machine_snapshot import Device, Vendor
from gpuyard.policy.host_room import CpuLayout, parse_cpus
from gpuyard.probes.devices_and_processes import pci_bus_id
from gpuyard.probes.parse_numbers import whole

_ROOT = Path("/")
_VENDORS = {"0x10de": Vendor.NVIDIA, "0x1002": Vendor.AMD, "0x8086": Vendor.INTEL}


def read_text(path: Path) -> str | None:
    """Return the stripped text of the file, or None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except (OSError, ValueError):
        return None


def names_in(folder: Path) -> list[str]:
    """Return the sorted names in the folder; none if it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def sees_all_processes(root: Path = _ROOT) -> bool:
    """Return whether this process is in the first PID namespace, as outside of containers: its pids are a driver's."""
    try:
        return os.readlink(root / "proc/self/ns/pid") == "pid:[4026531836]"  # constant in the kernel
    except OSError:
        return False


def gpus_on_pci(root: Path = _ROOT) -> dict[str, Vendor]:
    """Return the vendor of each GPU by PCI bus id, whether or not a probe can read it."""
    found, folder = {}, root / "sys/bus/pci/devices"
    for name in names_in(folder):
        vendor = _VENDORS.get(read_text(folder / name / "vendor") or "")
        # Displays and accelerators. Intel's accelerators are NPUs and FPGAs; its GPUs are displays.
        classes = "0x03" if vendor is Vendor.INTEL else ("0x03", "0x12")
        if vendor and (read_text(folder / name / "class") or "").startswith(classes):
            found[name] = vendor
    return found


def vendors_on_pci(root: Path = _ROOT) -> frozenset[Vendor]:
    return frozenset(gpus_on_pci(root).values())


def cards_of_compute_driver(nodes: Path) -> list[tuple[int, str]]:
    """Return the number that AMD's compute driver gives to each of its GPUs, and the PCI bus id, in its order. A GPU
    that this user may not use has no readable number, and ROCr leaves it out."""
    found = []
    for name in sorted(filter(str.isdecimal, names_in(nodes)), key=int):
        number, text = whole(read_text(nodes / name / "gpu_id")), read_text(nodes / name / "properties")
        if number and text is not None:
            properties = {
                key: whole(value) or 0 for key, _, value in (line.partition(" ") for line in text.splitlines())
            }
            place = properties.get("location_id", 0)  # the upper bits number the partitions of a card
            bus_id = f"{properties.get('domain', 0):04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"
            found.append((number, bus_id))
    return found


def read_cpu_layout(root: Path = _ROOT) -> CpuLayout:
    """Return the CPUs that this process may use, and their nodes; no CPUs on systems other than Linux."""
    if not hasattr(os, "sched_getaffinity"):  # macOS has none
        return CpuLayout()
    allowed = frozenset(os.sched_getaffinity(0))
    nodes = {}
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        cpus = parse_cpus(read_text(folder / "cpulist")) & allowed
        if cpus and folder.name[4:].isdecimal():
            nodes[int(folder.name[4:])] = cpus
    return CpuLayout(allowed=allowed, nodes=nodes)


def node_of(device: Device, root: Path = _ROOT) -> int | None:
    """Return the NUMA node of a GPU, or None where the kernel does not say: its -1 is unknown, unless the machine has
    only one node."""
    bus_id = pci_bus_id(device.pci_bus_id)
    text = None if bus_id is None else read_text(root / "sys/bus/pci/devices" / bus_id / "numa_node")
    if text is not None and text.isascii() and text.isdecimal():
        return int(text)
    is_only_one = text is not None and read_text(root / "sys/devices/system/node/online") == "0"
    return 0 if is_only_one else None
