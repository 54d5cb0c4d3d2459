"""Metrics of a simulated pass, for the table and for scripts."""

from collections.abc import Sequence

from msgspec import Struct

from gpuyard.core.job.job import OutcomeKind
from gpuyard.simulator.makespan_bound import MakespanBound
from gpuyard.simulator.trace_file import TraceJob


class SimulatedRun(Struct, frozen=True, kw_only=True):
    """One attempt. `job` is its position in the trace; times count from the start of the pass. It did `done_s` of its
    work, and was suspended for `paused_s`, including the moves of its memory."""

    job: int
    started_s: float
    ended_s: float
    devices: tuple[int, ...]
    outcome: OutcomeKind
    peak_mb: float = 0.0
    done_s: float = 0.0
    paused_s: float = 0.0
    suspensions: int = 0


class SimulatedPass(Struct, frozen=True, kw_only=True):
    """One pass over a trace. `memory_mb_s` and `compute_s` (seconds of demand) are integrals over all devices."""

    jobs: Sequence[TraceJob]
    runs: Sequence[SimulatedRun]
    devices_mb: Sequence[float]
    memory_mb_s: float
    compute_s: float
    steps: int = 0


class PolicyMetrics(Struct, frozen=True, kw_only=True):
    """`preempted_s` is the cost of preemption: the suspended time, and the lost work of jobs that were queued again.
    `wasted_s` is the work of all attempts that did not succeed."""

    policy: str
    pass_number: int
    jobs: int
    lost: int
    makespan_s: float
    bound_s: float
    bound_reason: str
    mean_wait_s: float
    p99_wait_s: float
    mean_completion_s: float
    p99_completion_s: float
    memory_percent: float
    compute_percent: float
    starts: int
    out_of_memory: int
    suspensions: int
    requeues: int
    preempted_s: float
    wasted_s: float

    @property
    def over_bound(self) -> float:
        return self.makespan_s / self.bound_s if self.bound_s else 1.0


def measure_pass(policy: str, pass_number: int, passed: SimulatedPass, bound: MakespanBound) -> PolicyMetrics:
    ours = [(number, job) for number, job in enumerate(passed.jobs) if not job.is_foreign]
    good = {run.job: run for run in passed.runs if run.outcome is OutcomeKind.SUCCEEDED}
    done = [(job, good[number]) for number, job in ours if number in good]
    first = min((job.at_s for _, job in ours), default=0.0)
    makespan_s = max((run.ended_s for _, run in done), default=first) - first
    waits = sorted(run.started_s - job.at_s for job, run in done)
    completions = sorted(run.ended_s - job.at_s for job, run in done)
    device_s = makespan_s * len(passed.devices_mb) or 1.0
    requeued = [run for run in passed.runs if run.outcome is OutcomeKind.PREEMPTED]
    return PolicyMetrics(
        policy=policy,
        pass_number=pass_number,
        jobs=len(ours),
        lost=len(ours) - len(done),
        makespan_s=makespan_s,
        bound_s=bound.makespan_s,
        bound_reason=bound.reason,
        mean_wait_s=_mean(waits),
        p99_wait_s=percentile(waits, 0.99),
        mean_completion_s=_mean(completions),
        p99_completion_s=percentile(completions, 0.99),
        memory_percent=100.0 * passed.memory_mb_s / (makespan_s * sum(passed.devices_mb) or 1.0),
        compute_percent=100.0 * passed.compute_s / device_s,
        starts=len(passed.runs),
        out_of_memory=sum(run.outcome is OutcomeKind.OUT_OF_MEMORY for run in passed.runs),
        suspensions=sum(run.suspensions for run in passed.runs),
        requeues=len(requeued),
        preempted_s=sum(run.paused_s for run in passed.runs) + sum(run.done_s for run in requeued),
        wasted_s=sum(run.done_s for run in passed.runs if run.outcome is not OutcomeKind.SUCCEEDED),
    )


def percentile(ordered: Sequence[float], part: float) -> float:
    """Return the smallest value that at least this part of the values do not exceed."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, max(0, int(-(-part * len(ordered) // 1)) - 1))]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
