"""Parse a saved output of a vendor's tool as the probe would."""

import codecs
import importlib
from collections.abc import Callable

from gpuyard.core.snapshot import Host, Reading, Snapshot
from gpuyard.probes.common.printable_reading import printable_reading
from gpuyard.probes.machine_reader import assemble

_PARSERS = {
    "nvidia-smi-xml": ("gpuyard.probes.nvidia.nvidia_smi_xml", "parse_xml"),
    "nvidia-smi-csv": ("gpuyard.probes.nvidia.nvidia_smi_csv", "parse_csv"),
    "nvidia-smi-apps": ("gpuyard.probes.nvidia.nvidia_smi_csv", "parse_apps"),
    "rocm-smi": ("gpuyard.probes.amd.rocm_smi", "parse"),
    "amd-smi": ("gpuyard.probes.amd.amd_smi", "parse"),
    "radeontop": ("gpuyard.probes.amd.radeontop", "parse"),
    "intel_gpu_top": ("gpuyard.probes.intel.intel_gpu_top", "parse"),
    "xpu-smi": ("gpuyard.probes.intel.xpu_smi", "parse"),
    "powermetrics": ("gpuyard.probes.apple.powermetrics", "parse_powermetrics"),
    "ioreg": ("gpuyard.probes.apple.ioreg", "parse_ioreg"),
}
TOOLS = tuple(_PARSERS)
# Byte order marks of files written with `>` in PowerShell, or saved by a Windows editor.
_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


def find_parser(tool: str) -> Callable[[str], Reading]:
    module, function = _PARSERS[tool]
    parser: Callable[[str], Reading] = getattr(importlib.import_module(module), function)
    return parser


def replay(tool: str, output: bytes) -> Snapshot:
    """Return the snapshot in the output. Raise a ProbeError if it is not an output of this tool."""
    encoding = next((name for mark, name in _MARKS.items() if output.startswith(mark)), "utf-8")
    reading = find_parser(tool)(output.decode(encoding, "replace"))
    return assemble(None, Host(), [printable_reading(reading)])
