"""Decide an exported world again (`gpuyard why --export`), and say what the plan is and why.

Compare policies: read or draw a trace, run it under each policy, and measure it against the lower bound."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from gpuyard.errors import UserError
from gpuyard.model.machine_snapshot import Device
from gpuyard.policy.plan import WorldFile
from gpuyard.policy.wait_reasons import group_by_device
from gpuyard.policy.world import Plan
from gpuyard.simulated_usage import parse_devices, split_spec
from gpuyard.simulator.schedule_metrics import MakespanBound, PolicyMetrics, SimulatedPass, lower_bound, measure_pass
from gpuyard.simulator.simulation import Simulation, find_policy
from gpuyard.simulator.timeline_picture import Panel
from gpuyard.simulator.traces import (
    PAIRS_FILE,
    Sharing,
    TraceJob,
    draw,
    is_pod_list,
    mean_duration_s,
    read_pods,
    read_programs,
    read_sharing,
    read_trace,
)


def plan_lines(file: WorldFile, plan: Plan) -> Iterator[str]:
    """Yield the plan: the job that the file is about first, with all of its reasons."""
    snapshot = file.world.machine.snapshot
    about = next((each for each in plan.waiting if each.lane.id == file.lane), None)
    ahead = plan.waiting if about is None else plan.waiting[: plan.waiting.index(about)]
    if about is not None:
        behind = f" behind job {about.job_id}, which is like it and waits" if about.job_id != file.job_id else ""
        yield f"job {file.job_id} waits{behind}"
        yield from (f"  {text}" for text in group_by_device(about.reasons, snapshot.labels))
        remedies = dict.fromkeys(reason.remedy for reason in about.reasons if reason.remedy)
        yield from (f"  to change that: {remedy}" for remedy in remedies)
    for start in plan.starts:
        where = ", ".join(snapshot.label(share.device_id) for share in start.claim.shares)
        yield f"job {start.job_id} {'resumes' if start.lane.resumes else 'starts'}{f' on GPU {where}' if where else ''}"
    for preempt in plan.preempts:
        yield f"job {preempt.job_id} makes way for job {preempt.for_job}"
    if plan.head is not None:
        yield f"job {plan.head.job_id} is the first that waits"
    if ahead:
        names = [f"job {each.job_id} (priority {each.lane.priority})" for each in ahead[:5]]
        names += [f"{len(ahead) - 5} more"] if len(ahead) > 5 else []
        yield f"{'waiting' if about is None else 'ahead of it'}, with jobs like them: {', '.join(names)}"


# A drawn trace arrives twice as fast as one job per device could run: otherwise all policies have the same makespan.
SATURATED = 2.0


class ComparisonRequest(Struct, frozen=True, kw_only=True):
    """A trace to read, or a mix to draw one from, and how to run it. Default of `per_hour`: twice what one job per
    device could do; of `quantum_s`: 0, or more for very many jobs."""

    trace: Path | None = None
    mix: tuple[str, ...] = ()
    jobs: int = 400
    per_hour: float | None = None
    seed: int = 1
    devices: str = "4x24GB"
    policies: tuple[str, ...] = ("fifo", "gpuyard")
    passes: int = 2
    quantum_s: float | None = None
    traces: Path | None = None  # the files of measured programs


class Compared(Struct, frozen=True, kw_only=True):
    """The result. Left out are `too_large` jobs, which do not fit on this machine, and `never_ran` jobs, which did not
    run in the original. `last` is the last pass of each policy."""

    devices: str
    jobs: tuple[TraceJob, ...]
    too_large: int
    never_ran: int
    bound: MakespanBound
    figures: tuple[PolicyMetrics, ...]
    last: tuple[Panel, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "devices": self.devices,
            "jobs": len(self.jobs),
            "too_large": self.too_large,
            "never_ran": self.never_ran,
            "bound": {**asdict(self.bound), "makespan_s": self.bound.makespan_s, "reason": self.bound.reason},
            "passes": [{**asdict(figures), "over_bound": figures.over_bound} for figures in self.figures],
        }


def compare(request: ComparisonRequest) -> Compared:
    if links := split_spec(request.devices)[1]:
        raise UserError(
            f"the policies are compared without {' and '.join(links)}",
            hint="leave them out of --devices; GPUYARD_SIMULATE takes them",
        )
    devices, policies = parse_devices(request.devices), [find_policy(text) for text in request.policies]
    found, never_ran = _trace(request, devices)
    # The measured pairs are used if their file exists, else the fitted curve alone.
    traces = request.traces
    sharing = read_sharing(traces) if traces is not None and (traces / PAIRS_FILE).exists() else Sharing()
    jobs = tuple(runnable(found, devices))
    if not jobs:
        raise UserError(
            f"none of the {len(found)} jobs could run on {request.devices}",
            hint="simulate larger devices with --devices",
        )
    bound = lower_bound(jobs, sizes_mb(devices), sharing)
    quantum_s = default_quantum_s(jobs) if request.quantum_s is None else request.quantum_s
    figures, last = [], []
    for policy in policies:
        with contextlib.closing(Simulation(devices, sharing, policy, quantum_s)) as simulation:
            for number in range(1, request.passes + 1):
                passed: SimulatedPass = simulation.play(jobs)
                figures.append(measure_pass(policy.name, number, passed, bound))
        last.append(Panel(passed=passed, metrics=figures[-1]))
    return Compared(
        devices=request.devices, jobs=jobs, too_large=len(found) - len(jobs), never_ran=never_ran, bound=bound,
        figures=tuple(figures), last=tuple(last),
    )  # fmt: skip


def sizes_mb(devices: tuple[Device, ...]) -> list[float]:
    return [device.memory_total_mb or 0.0 for device in devices]


def _trace(request: ComparisonRequest, devices: tuple[Device, ...]) -> tuple[list[TraceJob], int]:
    """Return the jobs, and the number of jobs in the trace that never ran."""
    if request.trace is not None:
        pods = is_pod_list(request.trace)
        return read_pods(request.trace, max(sizes_mb(devices))) if pods else (read_trace(request.trace), 0)
    if request.traces is None:
        raise UserError("--mix needs the files of measured programs", hint="set GPUYARD_TRACES to their directory")
    programs = read_programs(request.mix, request.traces)
    per_hour = request.per_hour or 3600.0 * SATURATED * len(devices) / mean_duration_s(programs)
    return draw(programs, request.jobs, request.seed, per_hour), 0


def runnable(jobs: Iterable[TraceJob], devices: tuple[Device, ...]) -> list[TraceJob]:
    """Return the jobs for which there are enough devices with enough memory."""
    largest_first = sorted(sizes_mb(devices), reverse=True)
    return [job for job in jobs if job.gpus <= len(devices) and job.peak_mb <= largest_first[job.gpus - 1]]


def default_quantum_s(jobs: Sequence[TraceJob]) -> float:
    """Return 0 (exact); with more than 20,000 jobs one step covers all events within 4% of the mean duration."""
    return 0.0 if len(jobs) <= 20_000 else 0.04 * sum(job.duration_s for job in jobs) / len(jobs)
