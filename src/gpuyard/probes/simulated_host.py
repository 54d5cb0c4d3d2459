"""A host with simulated RAM and CPUs: `GPUYARD_SIMULATE_HOST=23GB`, or `23GB,8` for 8 CPUs.

All of its RAM is available, whatever programs use: reservations alone decide how many jobs start. A test can
say how much is in use. All other figures are those of the real host.
"""

from collections.abc import Callable

from msgspec.structs import replace

from gpuyard.core.snapshot import Host
from gpuyard.core.units import parse_size
from gpuyard.errors import UserError
from gpuyard.probes.machine_reader import HostProbe

_EXAMPLE = "write it as 23GB, or as 23GB,8 for 8 CPUs"


class SimulatedHost:
    """The figures of `real`, with simulated RAM and CPUs. `used_mb` returns how much RAM is in use."""

    def __init__(self, spec: str, real: HostProbe, used_mb: Callable[[], float] = lambda: 0.0) -> None:
        self._used_mb = used_mb
        size, _, cpus = spec.partition(",")
        self._real = real
        try:
            self._ram_mb, self._cpus = parse_size(size), int(cpus) if cpus else None
        except (UserError, ValueError):
            raise UserError(f"GPUYARD_SIMULATE_HOST is '{spec}'", hint=_EXAMPLE) from None
        if self._ram_mb <= 0 or (self._cpus is not None and self._cpus < 1):
            raise UserError(f"GPUYARD_SIMULATE_HOST is '{spec}', a machine without RAM or CPUs", hint=_EXAMPLE)

    def read(self) -> Host:
        host = self._real.read()
        return self.read_memory(replace(host, cpu_count=host.cpu_count if self._cpus is None else float(self._cpus)))

    def read_memory(self, host: Host) -> Host:
        available_mb = max(0.0, self._ram_mb - self._used_mb())
        return replace(host, memory_total_mb=self._ram_mb, memory_available_mb=available_mb)
