"""Answers about memory: what the next run of a job gets and why, and advice."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from gpuyard.control.preallocation_watch import EVENT as PREALLOCATES
from gpuyard.core.job.job import Attempt, Job
from gpuyard.core.job.lifecycle import WAITING
from gpuyard.core.lease import FixedMemory, Need, PartOfDevice
from gpuyard.core.memory.estimates import Profile, is_consistent, memory_estimate
from gpuyard.core.memory.preallocation import find_preallocation
from gpuyard.core.scheduling.device_fit import check_suitable
from gpuyard.core.scheduling.device_memory import capacity
from gpuyard.core.scheduling.host_capacity import grantable_mb
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.engines.common.oom_evidence import loaded_libraries, read_tail
from gpuyard.schema.jobs import NextMemory

# What a job gets


def estimated_mb(scheduler: SchedulerLoop, job: Job) -> float | None:
    """Return what a waiting job would get on each GPU now; None for other jobs."""
    if job.state not in WAITING:
        return None
    is_open = job.spec.learns_memory or job.growth.count
    return (_need(scheduler, job) if is_open else job.spec.need).required_mb


def next_memory(scheduler: SchedulerLoop, job: Job) -> NextMemory | None:
    """Return what its next run gets on each GPU, and on which basis; None if it needs no GPU."""
    if not job.spec.need.devices:
        return None
    need = _need(scheduler, job)
    known = None
    if job.spec.learns_memory:
        profiles = scheduler.controller.transitions.estimates.profiles(job)
        consistent = [each for each in profiles if each is not None and is_consistent(each)]
        known = next((each for each in consistent if memory_estimate(each) is not None), None)
    return NextMemory(
        basis=_basis(job, known),
        given_mb=need.required_mb,
        alone=need.is_exclusive,
        runs=len(known.peaks_mb) if known is not None else None,
        same_command=known.is_exact if known is not None else None,
    )


def _need(scheduler: SchedulerLoop, job: Job) -> Need:
    if job.spec.engine:
        return scheduler.controller.transitions.estimates.need_elsewhere(job)
    controller, snapshot = scheduler.controller, scheduler.sampling.latest.snapshot
    devices, most_mb = snapshot.usable_devices(), grantable_mb(snapshot.host, controller.rules.host.limits)
    estimates, first_runs = controller.transitions.estimates, controller.rules.first_runs
    need = estimates.need(job.id, devices, first_runs, grantable_mb=most_mb)
    if not isinstance(need.memory, PartOfDevice):
        return need
    suiting = [size for each in devices if check_suitable(need, each) is None and (size := capacity(each)) is not None]
    return replace(need, memory=FixedMemory(need.memory.part * min(suiting, default=0.0)))  # the least that it may get


def _basis(job: Job, known: Profile | None) -> Literal["declared", "learned", "grown", "unknown"]:
    if job.growth.is_alone or job.growth.memory_mb is not None:
        return "grown"
    if not job.spec.learns_memory:
        return "declared"
    return "learned" if known is not None else "unknown"


# Advice


def advice(scheduler: SchedulerLoop, job: Job, attempts: Sequence[Attempt]) -> list[str]:
    """Return hints that would let other jobs share its GPU: a framework that takes all memory, a --vram that is far
    off."""
    events = scheduler.queries.events(job.id)
    seen = next((text for _, kind, text in reversed(events) if kind == PREALLOCATES), None)
    taken = seen or (_takes_all(scheduler, job, attempts[-1]) if attempts else None)
    declared = [text for _, kind, text in events if kind == "declared"]
    return [text for text in (taken, *declared[-1:]) if text]


def _takes_all(scheduler: SchedulerLoop, job: Job, attempt: Attempt) -> str | None:
    peak = attempt.usage.peak_mb if attempt.usage is not None else None
    devices = filter(None, map(scheduler.sampling.latest.snapshot.device, attempt.devices))
    total = min((device.memory_total_mb for device in devices if device.memory_total_mb), default=None)
    if peak is None or total is None or peak < total / 2:
        return None  # too little for preallocation: the log need not be read
    traces = "\n".join(read_tail(Path(log)) for log in (attempt.log, attempt.error_log) if log is not None)
    if attempt.ended_at is None and attempt.pid is not None:
        traces += "\n" + loaded_libraries(attempt.pid)
    found = find_preallocation(job.argv, job.spec.environment, traces, peak, total)
    return None if found is None else found[1]
