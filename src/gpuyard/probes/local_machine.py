"""The probes of this machine, real ones, or simulated ones if GPUYARD_SIMULATE is set; and saved outputs of their
tools, parsed as the probes would.
"""

import codecs
import functools
import importlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gpuyard.config import simulated_devices, simulated_host
from gpuyard.model.machine_snapshot import Host, Reading, Snapshot, Vendor
from gpuyard.model.simulated_topology import parse_topology
from gpuyard.probes.device_links import LinkReader, ReadLinks, read_local_links
from gpuyard.probes.fallback_chain import FallbackChain, Probe, printable_reading
from gpuyard.probes.machine_reader import HostProbe, MachineReader, assemble
from gpuyard.probes.run_tool import find_any_tool
from gpuyard.simulated_usage import parse_devices
from gpuyard.system.clock import SystemClock

if TYPE_CHECKING:
    from gpuyard.ports import Clock

DEFAULT_DEADLINE_S = 2.0


def local_machine(deadline_s: float = DEFAULT_DEADLINE_S, clock: "Clock | None" = None) -> MachineReader:
    """Return a reader of this machine. `clock` says when a snapshot is taken; default: the wall clock."""
    clock = clock or SystemClock()
    chains = [FallbackChain(vendor, probes, clock) for vendor, probes in local_probes().items()]
    return MachineReader(chains, local_host(), clock, deadline_s, LinkReader(local_links()))


def local_host() -> HostProbe:
    """Return the probe of this machine's CPUs and RAM, which may be simulated."""
    from gpuyard.probes.host import PsutilHost
    from gpuyard.probes.simulated_devices import SimulatedHost

    spec = simulated_host()
    return PsutilHost() if spec is None else SimulatedHost(spec, PsutilHost())


def snapshot(deadline_s: float = DEFAULT_DEADLINE_S) -> Snapshot:
    """Return the current devices and host of this machine. Probes stay open, so that the next call is cheap."""
    with _guard.lock:
        machine = _machine(deadline_s, simulated_devices(), simulated_host(), os.environ.get("GPUYARD_HOME"))
        return machine.snapshot()


class _Guard:
    """A lock that is replaced after a fork, because the parent may have held it at that moment."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.lock = threading.Lock()


_guard = _Guard()


@functools.lru_cache(maxsize=4)
def _machine(deadline_s: float, *_: str | None) -> MachineReader:
    """Return one reader per simulation and GPUYARD_HOME, since simulated devices differ between them."""
    return local_machine(deadline_s)


def local_probes() -> dict[Vendor, Sequence[Probe]]:
    """Return the probes of each vendor in fallback order."""
    if simulated_devices():
        from gpuyard.probes.simulated_devices import SimulatedDevices

        vendors = dict.fromkeys(device.vendor for device in SimulatedDevices().devices)
        return {vendor: [SimulatedDevices(vendor=vendor)] for vendor in vendors}
    from gpuyard.probes.amd.amdsmi_library import AmdSmiLibrary
    from gpuyard.probes.intel.sysfs import IntelSysfs
    from gpuyard.probes.nvidia.nvml import Nvml

    return {
        Vendor.NVIDIA: [Nvml(), _ToolProbe(Vendor.NVIDIA, "nvidia-smi", "gpuyard.probes.nvidia.nvidia_smi:NvidiaSmi")],
        Vendor.AMD: [
            AmdSmiLibrary(),
            _ToolProbe(Vendor.AMD, "amd-smi", "gpuyard.probes.amd.amd_smi:AmdSmi"),
            _ToolProbe(Vendor.AMD, "rocm-smi", "gpuyard.probes.amd.rocm_smi:RocmSmi"),
            _ToolProbe(Vendor.AMD, "radeontop", "gpuyard.probes.amd.radeontop:RadeonTop"),
        ],
        Vendor.INTEL: [
            _ToolProbe(Vendor.INTEL, "intel_gpu_top", "gpuyard.probes.intel.intel_gpu_top:IntelGpuTop"),
            _ToolProbe(Vendor.INTEL, "xpu-smi", "gpuyard.probes.intel.xpu_smi:XpuSmi"),
            IntelSysfs(),
        ],
        Vendor.APPLE: [_ToolProbe(Vendor.APPLE, "powermetrics+ioreg", "gpuyard.probes.apple_gpu:AppleProbe")],
    }


def local_links() -> ReadLinks:
    """Return the function that reads how devices are linked. It raises UserError for simulated links that it cannot
    understand before the first reading."""
    spec = simulated_devices()
    if spec is None:
        return read_local_links
    topology = parse_topology(spec, parse_devices(spec))
    return lambda _: topology


class _ToolProbe:
    """A command-line probe. `home` is the class that reads it, which is imported only if a tool of it is installed."""

    may_hang = False

    def __init__(self, vendor: Vendor, name: str, home: str) -> None:
        self.vendor = vendor
        self.name = name
        self._home = home
        self._reader: Any = None

    def read(self, timeout_s: float) -> Reading:
        if self._reader is None:
            find_any_tool(self.name.split("+"))
            module, _, class_name = self._home.partition(":")
            self._reader = getattr(importlib.import_module(module), class_name)()
        reading: Reading = self._reader.read(timeout_s)
        return reading


_PARSERS = {
    "nvidia-smi-xml": ("gpuyard.probes.nvidia.nvidia_smi", "parse_xml"),
    "nvidia-smi-csv": ("gpuyard.probes.nvidia.nvidia_smi_csv", "parse_csv"),
    "nvidia-smi-apps": ("gpuyard.probes.nvidia.nvidia_smi_csv", "parse_apps"),
    "rocm-smi": ("gpuyard.probes.amd.rocm_smi", "parse"),
    "amd-smi": ("gpuyard.probes.amd.amd_smi", "parse"),
    "radeontop": ("gpuyard.probes.amd.radeontop", "parse"),
    "intel_gpu_top": ("gpuyard.probes.intel.intel_gpu_top", "parse"),
    "xpu-smi": ("gpuyard.probes.intel.xpu_smi", "parse"),
    "powermetrics": ("gpuyard.probes.apple_gpu", "parse_powermetrics"),
    "ioreg": ("gpuyard.probes.apple_gpu", "parse_ioreg"),
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
