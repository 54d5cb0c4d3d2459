"""Map exactly the devices of a job into its container.

- NVIDIA, podman: by CDI, the names in the specs that `nvidia-ctk cdi generate` writes. It names devices by UUID or by
  index, depending on its version.
- NVIDIA, docker: `--gpus`, by UUID.
- AMD and Intel: the render nodes of the cards, and AMD's /dev/kfd.
- Apptainer maps all devices of a vendor; the program sees its own by environment variables, as on the host.
- Simulated devices are environment variables only.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from gpuyard.core.snapshot import Device, Vendor
from gpuyard.errors import UserError

_CDI_FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
_CDI_KIND = "nvidia.com/gpu"
_CDI_NAME = re.compile(r"""["']?name["']?:\s*["']?([\w:.-]+)""")
_PCI_DEVICES = Path("/sys/bus/pci/devices")
# The NVIDIA runtime would otherwise map all cards if the image asks for them, as most of NVIDIA's do.
_NO_MORE_NVIDIA = ("--env", "NVIDIA_VISIBLE_DEVICES=void")


def device_options(tool: str, devices: Sequence[Device]) -> tuple[str, ...]:
    """Return the options of the tool that map these devices. Raises UserError if that is not possible."""
    real = [device for device in devices if not device.is_simulated]
    nvidia = [device for device in real if device.vendor is Vendor.NVIDIA]
    with_nodes = [device for device in real if device.vendor in (Vendor.AMD, Vendor.INTEL)]
    has_amd = any(device.vendor is Vendor.AMD for device in with_nodes)
    if tool == "apptainer":
        return (*(["--nv"] if nvidia else []), *(["--rocm"] if has_amd else []))
    nodes = [*(["/dev/kfd"] if has_amd else []), *(node for device in with_nodes for node in render_nodes(device))]
    return (*_nvidia_options(tool, nvidia), *(text for node in dict.fromkeys(nodes) for text in ("--device", node)))


def _nvidia_options(tool: str, devices: Sequence[Device]) -> list[str]:
    if not devices:
        return list(_NO_MORE_NVIDIA)
    if tool == "docker":
        ids = ",".join(device.id for device in devices)
        return ["--gpus", f'"device={ids}"']  # a value of CSV: the quotes belong to it
    known = cdi_names()
    names = [f"{_CDI_KIND}={_name(device, known)}" for device in devices]
    return [*_NO_MORE_NVIDIA, *(text for name in names for text in ("--device", name))]


def _name(device: Device, known: frozenset[str]) -> str:
    index = "" if device.index is None or device.parent is not None else str(device.index)
    found = next((name for name in (device.id, index, f"gpu{index}") if name in known), None)
    if found is None:
        raise UserError(
            f"podman has no CDI description of the GPU {device.id}",
            hint="write one: sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
        )
    return found


def cdi_names() -> frozenset[str]:
    """Return the names of NVIDIA devices in the machine's CDI specs."""
    names: set[str] = set()
    for folder in _CDI_FOLDERS:
        try:
            files = [path for path in folder.iterdir() if path.suffix in (".yaml", ".json")]
            texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
        except OSError:
            continue
        names.update(name for text in texts if _CDI_KIND in text for name in _CDI_NAME.findall(text))
    return frozenset(names)


def render_nodes(device: Device) -> list[str]:
    """Return the device files of a card, such as /dev/dri/renderD128. Raises UserError if the kernel has none."""
    folder = _PCI_DEVICES / (device.pci_bus_id or "unknown").lower() / "drm"
    try:
        nodes = sorted(entry.name for entry in folder.iterdir() if entry.name.startswith("renderD"))
    except OSError:
        nodes = []
    if not nodes:
        raise UserError(
            f"the device files of the GPU {device.id} were not found in {folder}",
            hint="see whether the kernel's driver is loaded",
        )
    return [f"/dev/dri/{node}" for node in nodes]
