"""The seams between what decides and what touches the world, as Protocols."""

from typing import Protocol

from gpuyard.core.model import Host, Reading, Vendor


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since the epoch, for people."""

    def monotonic(self) -> float:
        """Seconds that never go back, for measuring."""

    def sleep(self, seconds: float) -> None: ...


class Probe(Protocol):
    """One way of reading one vendor's devices, such as NVML or `nvidia-smi`."""

    @property
    def name(self) -> str:
        """The tool or library, as problems and `gpuyard doctor` call it."""

    @property
    def vendor(self) -> Vendor: ...

    @property
    def may_hang(self) -> bool:
        """Whether `read` can outlast its timeout, as a call into a driver can, and needs a thread of its own."""

    def read(self, timeout_s: float) -> Reading:
        """Raises a ProbeError, and nothing else, where the way is closed."""


class HostProbe(Protocol):
    def read(self) -> Host: ...
