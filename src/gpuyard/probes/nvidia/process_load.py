"""Load of each process on a card, from the samples that the driver takes a few times a second.

Rules:
- The load of a process is that of its newest sample. A process without a sample in the last two seconds was idle.
- Times are the driver's own, so samples are compared with each other and never with our clock.
- Samples of unlisted processes and samples above 100%, which some drivers report, are ignored. If no sample belongs to
  a listed process, all loads are unknown: in a container pids differ, and the first samples of a process come late.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from msgspec.structs import replace

from gpuyard.core.snapshot import Process

_WINDOW_US = 2_000_000
_WHOLE = 100


class LoadSample(Protocol):
    """A sample as NVML returns it; `timeStamp` is in microseconds."""

    pid: int
    timeStamp: int  # noqa: N815 - NVML's name
    smUtil: int  # noqa: N815


def window_start(samples: Iterable[LoadSample]) -> int:
    """Return the time since which samples count, given these samples."""
    return max(0, max((sample.timeStamp for sample in samples), default=0) - _WINDOW_US)


def with_loads(processes: Sequence[Process], samples: Sequence[LoadSample]) -> tuple[Process, ...]:
    """Return the processes with their utilization. `samples` are those of the driver since the last window began."""
    begins = window_start(samples)
    newest: dict[int, LoadSample] = {}
    for sample in samples:
        known = newest.get(sample.pid)
        is_newer = sample.timeStamp > (begins if known is None else known.timeStamp)
        if is_newer and sample.smUtil <= _WHOLE:
            newest[sample.pid] = sample
    if newest.keys().isdisjoint(process.pid for process in processes):
        return tuple(processes)
    return tuple(replace(each, utilization_percent=_load(newest.get(each.pid))) for each in processes)


def _load(sample: LoadSample | None) -> float:
    return 0.0 if sample is None else float(sample.smUtil)
