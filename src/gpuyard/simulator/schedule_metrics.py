"""Metrics of a simulated pass, and a lower bound on the makespan of a trace that no schedule can beat:

- A job takes at least its duration from its arrival on. All jobs that arrive from some moment on share all devices; a
device does at most one second of demand per second (`Sharing`) and holds at most its memory.
- Memory is weighed in several ways, each at most 1 for jobs that fit on a device together: by share of the device, and
by thresholds up to half, where a job that leaves less than the threshold free counts as a whole device and a job below
it as nothing."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from msgspec import Struct

from gpuyard.model.job import OutcomeKind
from gpuyard.simulator.traces import Phase, Sharing, TraceJob, phases_of


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


class MakespanBound(Struct, frozen=True, kw_only=True):
    """Bounds in seconds from the first arrival on, each for another reason; the largest counts."""

    longest_s: float
    compute_s: float
    memory_s: float
    crowding_s: float

    @property
    def makespan_s(self) -> float:
        return max(self.longest_s, self.compute_s, self.memory_s, self.crowding_s)

    @property
    def reason(self) -> str:
        parts = {
            "the longest job": self.longest_s,
            "compute": self.compute_s,
            "memory": self.memory_s,
            "jobs that fit beside few others": self.crowding_s,
        }
        return max(parts, key=lambda name: parts[name])


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
        policy=policy, pass_number=pass_number, jobs=len(ours), lost=len(ours) - len(done), makespan_s=makespan_s,
        bound_s=bound.makespan_s, bound_reason=bound.reason, mean_wait_s=_mean(waits),
        p99_wait_s=percentile(waits, 0.99), mean_completion_s=_mean(completions),
        p99_completion_s=percentile(completions, 0.99),
        memory_percent=100.0 * passed.memory_mb_s / (makespan_s * sum(passed.devices_mb) or 1.0),
        compute_percent=100.0 * passed.compute_s / device_s, starts=len(passed.runs),
        out_of_memory=sum(run.outcome is OutcomeKind.OUT_OF_MEMORY for run in passed.runs),
        suspensions=sum(run.suspensions for run in passed.runs), requeues=len(requeued),
        preempted_s=sum(run.paused_s for run in passed.runs) + sum(run.done_s for run in requeued),
        wasted_s=sum(run.done_s for run in passed.runs if run.outcome is not OutcomeKind.SUCCEEDED),
    )  # fmt: skip


def percentile(ordered: Sequence[float], part: float) -> float:
    """Return the smallest value that at least this part of the values do not exceed."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, max(0, int(-(-part * len(ordered) // 1)) - 1))]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def lower_bound(jobs: Sequence[TraceJob], devices_mb: Sequence[float], sharing: Sharing) -> MakespanBound:
    ours = sorted((job for job in jobs if not job.is_foreign), key=lambda job: -job.at_s)
    if not ours:
        return MakespanBound(longest_s=0.0, compute_s=0.0, memory_s=0.0, crowding_s=0.0)
    count, card_mb = len(devices_mb), max(devices_mb)
    # For how many seconds each job holds at least which share of a device.
    held = [
        [
            (after.from_s - phase.from_s, phase.memory_mb / card_mb)
            for phase, after in pairwise((*phases_of(job), Phase(job.duration_s, 0.0)))
        ]
        for job in ours
    ]
    demands = [sharing.demand((job.kind, job.load_percent)) * (job.duration_s - job.start_s) for job in ours]

    def memory_end(devices: float, threshold: float) -> float:
        return _even_end(ours, devices, [_device_seconds(each, threshold) for each in held])

    return MakespanBound(
        longest_s=max(job.at_s + job.duration_s for job in ours) - ours[-1].at_s,
        compute_s=_even_end(ours, count, demands),
        memory_s=memory_end(sum(devices_mb) / card_mb, 0.0),
        crowding_s=max(memory_end(count, threshold) for threshold in (0.125, 0.25, 0.375, 0.5)),
    )


def _even_end(latest_first: Sequence[TraceJob], devices: float, work_s: Sequence[float]) -> float:
    """Return the earliest end of all work if, from each arrival on, the work is spread evenly over all devices."""
    first = latest_first[-1].at_s
    total, end = 0.0, first
    for job, seconds in zip(latest_first, work_s, strict=True):
        total += seconds * job.gpus
        end = max(end, job.at_s + total / devices)
    return end - first


def _device_seconds(held: Iterable[tuple[float, float]], threshold: float) -> float:
    """Return the device-seconds that the memory of a job takes up at least."""
    counted = [(seconds, share) for seconds, share in held if share >= threshold]
    return sum([seconds * (1.0 if share > 1.0 - threshold else share) for seconds, share in counted])
