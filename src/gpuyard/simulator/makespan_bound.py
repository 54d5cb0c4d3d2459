"""How short the makespan of a trace could be at best: what no schedule can beat in the simulated world.

- A job takes its duration from its arrival on, however alone it is.
- Whatever arrives from some moment on is work for all devices together from then on. A device does at most one second
  of demand per second (see `sharing`), and holds at most its memory.
- Memory is weighed in several ways, each of which adds up to at most 1 for jobs that fit on a device together: by its
  share of the device; by halves, where a job over half of a device counts as a whole one; and by thresholds in
  between, where a job that leaves less than the threshold free counts as a whole one, and one below it as nothing.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from msgspec import Struct

from gpuyard.simulator.sharing_slowdown import Sharing
from gpuyard.simulator.trace_file import TraceJob, phases_of

# As parts of a device: 0 weighs by memory alone, 0.5 by halves.
_THRESHOLDS = (0.0, 0.125, 0.25, 0.375, 0.5)


class MakespanBound(Struct, frozen=True, kw_only=True):
    """From the first arrival on; the largest of the reasons is the bound."""

    longest_s: float
    compute_s: float
    memory_s: float
    crowding_s: float

    @property
    def makespan_s(self) -> float:
        return max(self.longest_s, self.compute_s, self.memory_s, self.crowding_s)

    @property
    def reason(self) -> str:
        """What makes the bound as high as it is."""
        parts = {
            "the longest job": self.longest_s,
            "compute": self.compute_s,
            "memory": self.memory_s,
            "jobs that fit beside few others": self.crowding_s,
        }
        return max(parts, key=lambda name: parts[name])


def lower_bound(jobs: Sequence[TraceJob], devices_mb: Sequence[float], sharing: Sharing) -> MakespanBound:
    ours = sorted((job for job in jobs if not job.is_foreign), key=lambda job: -job.at_s)
    if not ours:
        return MakespanBound(longest_s=0.0, compute_s=0.0, memory_s=0.0, crowding_s=0.0)
    first, count, card_mb = ours[-1].at_s, len(devices_mb), max(devices_mb)
    held = [list(_stretches(job, card_mb)) for job in ours]
    demands = [sharing.demand((job.kind, job.load_percent)) * job.duration_s for job in ours]
    weighed = [_suffix(ours, count, [_crowd(each, threshold) for each in held]) for threshold in _THRESHOLDS[1:]]
    return MakespanBound(
        longest_s=max(job.at_s + job.duration_s for job in ours) - first,
        compute_s=_suffix(ours, count, demands),
        memory_s=_suffix(ours, sum(devices_mb) / card_mb, [_crowd(each, _THRESHOLDS[0]) for each in held]),
        crowding_s=max(weighed),
    )


def _suffix(latest_first: Sequence[TraceJob], devices: float, work_s: Sequence[float]) -> float:
    """The end of all work, were what arrives from each moment on spread evenly over all devices."""
    first = latest_first[-1].at_s
    total, end = 0.0, first
    for job, seconds in zip(latest_first, work_s, strict=True):
        total += seconds * job.gpus
        end = max(end, job.at_s + total / devices)
    return end - first


def _stretches(job: TraceJob, card_mb: float) -> Iterator[tuple[float, float]]:
    """For how long it holds which part of a device at least."""
    phases = phases_of(job)
    for phase, following in pairwise(phases):
        yield following.from_s - phase.from_s, phase.memory_mb / card_mb
    yield job.duration_s - phases[-1].from_s, phases[-1].memory_mb / card_mb


def _crowd(held: Iterable[tuple[float, float]], threshold: float) -> float:
    """The device-seconds that a job's memory takes up at least."""
    return sum([seconds * _weight(share, threshold) for seconds, share in held])


def _weight(share: float, threshold: float) -> float:
    if share > 1.0 - threshold:
        return 1.0
    return share if share >= threshold else 0.0
