"""From a wish to figures: the trace is read or drawn, run under each policy, and measured beside the lower bound."""

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from gpuyard.core.snapshot import Device
from gpuyard.errors import UserError
from gpuyard.simulated_usage import parse_devices
from gpuyard.simulator.makespan_bound import MakespanBound, lower_bound
from gpuyard.simulator.policies import find_policies
from gpuyard.simulator.program_mixes import draw, is_pod_list, mean_duration_s, read_pods, read_programs
from gpuyard.simulator.schedule_metrics import PolicyMetrics, SimulatedPass, measure_pass
from gpuyard.simulator.sharing_slowdown import PAIRS_FILE, Sharing, read_sharing
from gpuyard.simulator.simulation import Simulation
from gpuyard.simulator.timeline_picture import Panel
from gpuyard.simulator.trace_file import TraceJob, read_trace

# A drawn trace arrives so many times faster than one job per device could be done, or its makespan would say nothing.
SATURATED = 2.0
# Beyond so many jobs a step sums up what happens within so much of a job's usual duration.
_MANY_JOBS, _SMALL_PART = 20_000, 0.04


class ComparisonRequest(Struct, frozen=True, kw_only=True):
    """What is asked for: a trace to read, or a mix to draw one from; where nothing is said, by the size of it."""

    trace: Path | None = None
    mix: tuple[str, ...] = ()
    jobs: int = 400
    per_hour: float | None = None
    seed: int = 1
    devices: str = "4x24GB"
    policies: tuple[str, ...] = ("fifo", "gpuyard")
    passes: int = 2
    quantum_s: float | None = None
    traces: Path | None = None


class Compared(Struct, frozen=True, kw_only=True):
    """Left out are `too_large` jobs that this machine could not hold, and `never_ran` of the trace's. `last` is each
    policy's last pass."""

    devices: str
    jobs: tuple[TraceJob, ...]
    too_large: int
    never_ran: int
    bound: MakespanBound
    figures: tuple[PolicyMetrics, ...]
    last: tuple[Panel, ...]

    def as_dict(self) -> dict[str, Any]:
        """The stable JSON shape."""
        return {
            "devices": self.devices,
            "jobs": len(self.jobs),
            "too_large": self.too_large,
            "never_ran": self.never_ran,
            "bound": {**asdict(self.bound), "makespan_s": self.bound.makespan_s, "reason": self.bound.reason},
            "passes": [{**asdict(figures), "over_bound": figures.over_bound} for figures in self.figures],
        }


def compare(wish: ComparisonRequest) -> Compared:
    devices = parse_devices(wish.devices)
    policies = find_policies(wish.policies)
    (found, never_ran), sharing = _trace(wish, devices), _sharing(wish)
    jobs = tuple(runnable(found, devices))
    if not jobs:
        raise UserError(f"none of the {len(found)} jobs could run on {wish.devices}", hint="name larger --devices")
    bound = lower_bound(jobs, sizes_mb(devices), sharing)
    quantum_s = usual_quantum_s(jobs) if wish.quantum_s is None else wish.quantum_s
    figures, last = [], []
    for policy in policies:
        with contextlib.closing(Simulation(devices, sharing, policy, quantum_s)) as simulation:
            for number in range(1, wish.passes + 1):
                passed: SimulatedPass = simulation.play(jobs)
                figures.append(measure_pass(policy.name, number, passed, bound))
        last.append(Panel(passed=passed, figures=figures[-1]))
    return Compared(
        devices=wish.devices,
        jobs=jobs,
        too_large=len(found) - len(jobs),
        never_ran=never_ran,
        bound=bound,
        figures=tuple(figures),
        last=tuple(last),
    )


def sizes_mb(devices: tuple[Device, ...]) -> list[float]:
    return [device.memory_total_mb or 0.0 for device in devices]


def _trace(wish: ComparisonRequest, devices: tuple[Device, ...]) -> tuple[list[TraceJob], int]:
    """The jobs, and how many there are that never ran."""
    if wish.trace is not None:
        pods = is_pod_list(wish.trace)
        return read_pods(wish.trace, max(sizes_mb(devices))) if pods else (read_trace(wish.trace), 0)
    if wish.traces is None:
        raise UserError("--mix draws from measured programs", hint="GPUYARD_TRACES=DIR names the folder they are in")
    programs = read_programs(wish.mix, wish.traces)
    per_hour = wish.per_hour or 3600.0 * SATURATED * len(devices) / mean_duration_s(programs)
    return draw(programs, wish.jobs, wish.seed, per_hour), 0


def _sharing(wish: ComparisonRequest) -> Sharing:
    """By the measured pairs where they are to be had, else by the curve alone."""
    if wish.traces is not None and (wish.traces / PAIRS_FILE).exists():
        return read_sharing(wish.traces)
    return Sharing()


def runnable(jobs: Iterable[TraceJob], devices: tuple[Device, ...]) -> list[TraceJob]:
    """Those for which there are enough devices that hold their memory."""
    largest_first = sorted(sizes_mb(devices), reverse=True)
    return [job for job in jobs if job.gpus <= len(devices) and job.peak_mb <= largest_first[job.gpus - 1]]


def usual_quantum_s(jobs: Sequence[TraceJob]) -> float:
    """None for small worlds: they are exact."""
    if len(jobs) <= _MANY_JOBS:
        return 0.0
    return _SMALL_PART * sum(job.duration_s for job in jobs) / len(jobs)
