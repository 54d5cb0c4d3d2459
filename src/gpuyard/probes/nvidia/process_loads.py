"""How busy each process keeps an NVIDIA card, from the samples that the driver takes a few times a second.

Rules:
- The load of a process is that of its newest sample. A process without a sample in the last two seconds was idle.
- Times are the driver's own, so samples are compared with each other and never with our clock.
- Samples of unlisted processes and samples above 100%, which some drivers report, are ignored. If no sample belongs to
  a listed process, all loads are unknown: in a container pids differ, and the first samples of a process come late.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from gpuyard.core.snapshot import Process

_WINDOW_US = 2_000_000
_WHOLE = 100


def window_start(samples: Iterable[Any]) -> int:
    """Return the time in microseconds since which samples count, given these samples of NVML."""
    return max(0, max((sample.timeStamp for sample in samples), default=0) - _WINDOW_US)


def with_loads(processes: Sequence[Process], samples: Sequence[Any]) -> tuple[Process, ...]:
    """Return the processes with their utilization. `samples` are NVML's since the last window began."""
    begins = window_start(samples)
    newest: dict[int, Any] = {}
    for sample in samples:
        known = newest.get(sample.pid)
        is_newer = sample.timeStamp > (begins if known is None else known.timeStamp)
        if is_newer and sample.smUtil <= _WHOLE:
            newest[sample.pid] = sample
    if newest.keys().isdisjoint(process.pid for process in processes):
        return tuple(processes)
    loads = {pid: float(sample.smUtil) for pid, sample in newest.items()}
    return tuple(replace(process, utilization_percent=loads.get(process.pid, 0.0)) for process in processes)
