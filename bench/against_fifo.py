"""What sharing must not cost: a pass compared with one job per GPU, first in first out, on the same trace.

- A first pass, with nothing learned, ends no later than under fifo, and jobs complete no later on average.
- No job waits more than twice as long as under fifo and ten minutes, the time counted in which it is suspended.
- A second pass, with everything learned, is no slower than the first.

`broken_promises` holds them against one trace. No policy that decides before it knows which jobs come later can keep
the first and the last of them on each trace (ADR 99), so `broken_means` holds these two against the mean over traces
that differ by chance alone: the same mix and machine with several seeds.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct

from gpuyard.model.job import OutcomeKind
from gpuyard.simulator.schedule_metrics import SimulatedPass, SimulatedRun

WAIT_FACTOR, WAIT_S = 2.0, 600.0
# Schedules that differ by less than this part count as equally fast.
_NOISE = 0.005
# By how much the mean over several seeds may be slower: with four seeds, chance alone moves it by about as much.
TOLERANCE = 0.02
FIGURES = ("makespan_s", "completion_s")


class PassSummary(Struct, frozen=True, kw_only=True):
    """`late_job` is the job (its position in the trace) whose wait exceeds its limit most, or comes nearest to it, and
    `late_s` by how much; `late_jobs` exceed it. `lost` jobs never succeeded."""

    makespan_s: float
    completion_s: float
    late_job: int
    late_s: float
    late_jobs: int
    starts: int
    out_of_memory: int
    suspensions: int
    lost: int

    @property
    def disturbed(self) -> float:
        """The part of all starts that were suspended or had to be run again."""
        return (self.out_of_memory + self.suspensions) / max(1, self.starts)


def summarize(passed: SimulatedPass, fifo: SimulatedPass) -> PassSummary:
    done, before = _successes(passed), _successes(fifo)
    jobs = {number: job for number, job in enumerate(passed.jobs) if not job.is_foreign}
    ended = {number: done[number].ended_s for number in jobs if number in done}
    late = {
        number: _wait(passed, done[number]) - WAIT_FACTOR * _wait(fifo, before[number]) - WAIT_S
        for number in ended
        if number in before
    }
    late_job = max(late, key=late.__getitem__, default=-1)
    return PassSummary(
        makespan_s=max(ended.values(), default=0.0) - min((job.at_s for job in jobs.values()), default=0.0),
        completion_s=sum(at - jobs[number].at_s for number, at in ended.items()) / max(1, len(ended)),
        late_job=late_job,
        late_s=late.get(late_job, 0.0),
        late_jobs=sum(each > 0 for each in late.values()),
        starts=len(passed.runs),
        out_of_memory=sum(run.outcome is OutcomeKind.OUT_OF_MEMORY for run in passed.runs),
        suspensions=sum(run.suspensions for run in passed.runs),
        lost=len(jobs) - len(ended),
    )


def broken_promises(fifo: PassSummary, passes: Sequence[PassSummary]) -> list[str]:
    """Return what the passes cost that they must not, in a few words each."""
    broken = []
    for number, each in enumerate(passes, 1):
        if each.late_s > 0:
            broken.append(f"pass {number}: job {each.late_job} waits {each.late_s:.0f} s too long")
        if each.lost > fifo.lost:
            broken.append(f"pass {number}: {each.lost - fifo.lost} jobs lost")
    for what in FIGURES:
        figures = [getattr(each, what) for each in (fifo, *passes)]
        for number, (before, after) in enumerate(pairwise(figures), 1):
            if after > before * (1 + _NOISE) + 1.0:
                than = "fifo" if number == 1 else f"pass {number - 1}"
                broken.append(f"pass {number}: {what[:-2]} {after / before - 1:+.1%} against {than}")
    return broken


def mean_ratio(what: str, figures: Sequence[tuple[PassSummary, PassSummary]]) -> float:
    """Return the geometric mean of a figure of the first of each pair as a part of that of the second."""
    ratios = [getattr(after, what) / getattr(before, what) for after, before in figures]
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def broken_means(passes: Sequence[tuple[PassSummary, ...]]) -> list[str]:
    """Return which figures are slower on average over several traces. For each trace: fifo, first and second pass."""
    broken = []
    for what in FIGURES:
        for number, than in ((1, "fifo"), (2, "pass 1")):
            ratio = mean_ratio(what, [(each[number], each[number - 1]) for each in passes])
            if ratio > 1 + TOLERANCE:
                broken.append(f"pass {number}: {what[:-2]} {ratio - 1:+.1%} against {than} on average")
    return broken


def _successes(passed: SimulatedPass) -> dict[int, SimulatedRun]:
    return {run.job: run for run in passed.runs if run.outcome is OutcomeKind.SUCCEEDED}


def _wait(passed: SimulatedPass, run: SimulatedRun) -> float:
    return run.started_s - passed.jobs[run.job].at_s + run.paused_s
