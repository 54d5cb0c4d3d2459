"""The probes of this machine, real ones, or simulated ones if GPUYARD_SIMULATE is set; and saved outputs of their
tools, parsed as the probes would."""

import codecs
import functools
import importlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gpuyard.config import simulated_devices, simulated_host
from gpuyard.model.machine_snapshot import Host, Reading, Snapshot, Vendor
from gpuyard.probes.device_links import LinkReader, read_local_links
from gpuyard.probes.fallback_chain import FallbackChain, Probe, printable_reading
from gpuyard.probes.machine_reader import HostProbe, MachineReader, assemble
from gpuyard.probes.run_tool import find_any_tool
from gpuyard.simulated_usage import parse_devices, parse_topology
from gpuyard.system.clock import SystemClock

if TYPE_CHECKING:
    from gpuyard.ports import Clock

DEFAULT_DEADLINE_S = 2.0


def local_machine(deadline_s: float = DEFAULT_DEADLINE_S, clock: "Clock | None" = None) -> MachineReader:
    """Return a reader of this machine. `clock` says when a snapshot is taken; default: the wall clock."""
    clock, spec = clock or SystemClock(), simulated_devices()
    chains = [FallbackChain(vendor, probes, clock) for vendor, probes in local_probes().items()]
    # Raises UserError for simulated links that it cannot understand, before the first reading.
    topology = None if spec is None else parse_topology(spec, parse_devices(spec))
    links = LinkReader(read_local_links if topology is None else lambda _: topology)
    return MachineReader(chains, local_host(), clock, deadline_s, links)


def local_host() -> HostProbe:
    """Return the probe of this machine's CPUs and RAM, which may be simulated."""
    from gpuyard.probes.host import PsutilHost
    from gpuyard.probes.simulated_devices import SimulatedHost

    spec = simulated_host()
    return PsutilHost() if spec is None else SimulatedHost(spec, PsutilHost())


def snapshot(deadline_s: float = DEFAULT_DEADLINE_S) -> Snapshot:
    """Return the current devices and host of this machine. Probes stay open, so that the next call is cheap."""
    with _lock:
        machine = _machine(deadline_s, simulated_devices(), simulated_host(), os.environ.get("GPUYARD_HOME"))
        return machine.snapshot()


_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock  # noqa: PLW0603 - the parent may have held it at the moment of the fork
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


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

    nvidia, amd, intel, apple = Vendor.NVIDIA, Vendor.AMD, Vendor.INTEL, Vendor.APPLE
    return {
        nvidia: [Nvml(), _ToolProbe(nvidia, "nvidia-smi", "nvidia.nvidia_smi:NvidiaSmi")],
        amd: [
            AmdSmiLibrary(),
            _ToolProbe(amd, "amd-smi", "amd.amd_smi:AmdSmi"),
            _ToolProbe(amd, "rocm-smi", "amd.rocm_smi:RocmSmi"),
            _ToolProbe(amd, "radeontop", "amd.radeontop:RadeonTop"),
        ],
        intel: [
            _ToolProbe(intel, "intel_gpu_top", "intel.intel_gpu_top:IntelGpuTop"),
            _ToolProbe(intel, "xpu-smi", "intel.xpu_smi:XpuSmi"),
            IntelSysfs(),
        ],
        apple: [_ToolProbe(apple, "powermetrics+ioreg", "apple_gpu:AppleProbe")],
    }


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
            self._reader = _find(self._home)()
        reading: Reading = self._reader.read(timeout_s)
        return reading


def _find(name: str) -> Any:
    module, _, member = name.partition(":")
    return getattr(importlib.import_module(f"gpuyard.probes.{module}"), member)


_PARSERS = {
    "nvidia-smi-xml": "nvidia.nvidia_smi:parse_xml",
    "nvidia-smi-csv": "nvidia.nvidia_smi:parse_csv",
    "nvidia-smi-apps": "nvidia.nvidia_smi:parse_apps",
    "rocm-smi": "amd.rocm_smi:parse",
    "amd-smi": "amd.amd_smi:parse",
    "radeontop": "amd.radeontop:parse",
    "intel_gpu_top": "intel.intel_gpu_top:parse",
    "xpu-smi": "intel.xpu_smi:parse",
    "powermetrics": "apple_gpu:parse_powermetrics",
    "ioreg": "apple_gpu:parse_ioreg",
}
TOOLS = tuple(_PARSERS)


def find_parser(tool: str) -> Callable[[str], Reading]:
    parser: Callable[[str], Reading] = _find(_PARSERS[tool])
    return parser


def replay(tool: str, output: bytes) -> Snapshot:
    """Return the snapshot in the output. Raise a ProbeError if it is not an output of this tool."""
    # Byte order marks of files written with `>` in PowerShell, or saved by a Windows editor.
    marks = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
    encoding = next((name for mark, name in marks.items() if output.startswith(mark)), "utf-8")
    reading = find_parser(tool)(output.decode(encoding, "replace"))
    return assemble(None, Host(), [printable_reading(reading)])
