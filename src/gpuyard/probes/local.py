"""This machine's own probes, put together: real ones, or simulated ones where GPUYARD_SIMULATE asks for them."""

from collections.abc import Sequence

from gpuyard.clock import SystemClock
from gpuyard.config import simulated_devices
from gpuyard.core.model import Snapshot, Vendor
from gpuyard.ports import Probe
from gpuyard.probes.chain import Chain
from gpuyard.probes.machine import Machine

DEFAULT_DEADLINE_S = 2.0


def local_machine(deadline_s: float = DEFAULT_DEADLINE_S) -> Machine:
    from gpuyard.probes.host import PsutilHost

    clock = SystemClock()
    chains = [Chain(vendor, probes, clock) for vendor, probes in local_probes().items()]
    return Machine(chains, PsutilHost(), clock, deadline_s)


def snapshot(deadline_s: float = DEFAULT_DEADLINE_S) -> Snapshot:
    """This machine's devices and host, now."""
    return local_machine(deadline_s).snapshot()


def local_probes() -> dict[Vendor, Sequence[Probe]]:
    """Every vendor's probes in their fallback order."""
    if simulated_devices():
        from gpuyard.probes.simulated import SimulatedDevices

        return {Vendor.SIMULATED: [SimulatedDevices()]}
    return {
        Vendor.NVIDIA: _nvidia(),
        Vendor.AMD: _amd(),
        Vendor.INTEL: _intel(),
        Vendor.APPLE: _apple(),
    }


def _nvidia() -> Sequence[Probe]:
    from gpuyard.probes.nvidia.nvml import Nvml
    from gpuyard.probes.nvidia.smi import NvidiaSmi

    return [Nvml(), NvidiaSmi()]


def _amd() -> Sequence[Probe]:
    from gpuyard.probes.amd.amd_smi import AmdSmi
    from gpuyard.probes.amd.library import AmdSmiLibrary
    from gpuyard.probes.amd.radeontop import RadeonTop
    from gpuyard.probes.amd.rocm_smi import RocmSmi

    return [AmdSmiLibrary(), AmdSmi(), RocmSmi(), RadeonTop()]


def _intel() -> Sequence[Probe]:
    from gpuyard.probes.intel.gpu_top import IntelGpuTop
    from gpuyard.probes.intel.sysfs import IntelSysfs
    from gpuyard.probes.intel.xpu_smi import XpuSmi

    return [IntelGpuTop(), XpuSmi(), IntelSysfs()]


def _apple() -> Sequence[Probe]:
    from gpuyard.probes.apple.probe import AppleProbe

    return [AppleProbe()]
