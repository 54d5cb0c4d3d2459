"""What sharing must not cost (`bench.against_fifo`), over many traces, machines and seeds.

One line per case: makespan and mean completion of each pass as parts of fifo's, the wait of the job that comes nearest
to its limit, and starts that ran out of memory or were suspended. `!` marks a broken promise, which follows in words.
Then a line per trace and machine (`bench.guarantees_table`), and how many cases are worse by how much.
"""

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from bench.against_fifo import FIGURES, PassSummary, broken_promises, mean_ratio, summarize
from bench.guarantees_table import histogram, table
from bench.simulate import harder
from gpuyard.model.machine_snapshot import Device
from gpuyard.simulated_usage import parse_devices
from gpuyard.simulator.compare_policies import SATURATED, runnable, sizes_mb
from gpuyard.simulator.schedule_metrics import SimulatedPass
from gpuyard.simulator.simulation import Simulation, find_policy
from gpuyard.simulator.traces import (
    PODS_FILE,
    Sharing,
    TraceJob,
    draw,
    mean_duration_s,
    read_pods,
    read_programs,
    read_sharing,
)

CARDS = ("1x24GB", "1x40GB", "1x80GB", "1x141GB", "2x24GB", "4x24GB", "8x80GB", "40x24GB")
# A mix; `hard` is harder to predict; `burst` arrives all at once.
TRACES = ("lucid", "carma", "lucid+carma", "lucid:hard", "carma:hard", "lucid+carma:burst", "openb")
_JOBS, _JOBS_PER_CARD, _MOST_JOBS = 24, 8, 160
_HEAD = f"{'trace':<18} {'cards':<8} {'seed':>4} {'jobs':>4}  {'makespan':>11}  {'completion':>11}  {'late':>7}  "


class Case(Struct, frozen=True, kw_only=True):
    trace: str
    cards: str
    seed: int
    policy: str = "gpuyard"


class CaseResult(Struct, frozen=True, kw_only=True):
    case: Case
    jobs: int
    fifo: PassSummary
    passes: tuple[PassSummary, PassSummary]
    broken: list[str]
    took_s: float


def bench_guarantees(arguments: Sequence[str]) -> None:
    """`arguments` choose cases: traces, cards, seeds (default 1 2) and policies (default gpuyard)."""
    if "GPUYARD_TRACES" not in os.environ:
        print("no simulation: set GPUYARD_TRACES to a folder of measured programs")
        return
    seeds = [int(word) for word in arguments if word.isdecimal()] or [1, 2]
    traces = [word for word in arguments if word.split(":")[0].split("+")[0] in ("lucid", "carma", "openb")] or TRACES
    cards = [word for word in arguments if "GB" in word] or CARDS
    policies = [word for word in arguments if word.startswith(("gpuyard", "declared"))] or ["gpuyard"]
    cases = [
        Case(trace=trace, cards=each, seed=seed, policy=policy)
        for policy, trace, each, seed in itertools.product(policies, traces, cards, seeds)
        if trace != "openb" or seed == seeds[0]
    ]
    print(f"{_HEAD}oom susp lost")
    results = []
    with get_context("fork").Pool(min(len(os.sched_getaffinity(0)), len(cases))) as pool:
        for result in pool.imap(run_case, cases):
            results.append(result)
            for line in _lines(result):
                print(line, flush=True)
    for policy in policies:
        of_policy = [result for result in results if result.case.policy == policy]
        cells = [(each.case.trace, each.case.cards, (each.fifo, *each.passes)) for each in of_policy]
        for line in (policy, *table(cells), *histogram(cells), _summary(policy, of_policy)):
            print(line)


def _summary(policy: str, results: Sequence[CaseResult]) -> str:
    """Return how often each promise is broken, and the geometric means of all ratios to fifo."""
    figures = []
    for what in FIGURES:
        for number in (0, 1):
            ratio = mean_ratio(what, [(each.passes[number], each.fifo) for each in results])
            figures.append(f"{what[:-2]} {number + 1}: {ratio:.3f}")
    broken = {
        what: sum(any(mark in words for words in each.broken) for each in results)
        for what, mark in (
            ("slower than fifo", "against fifo"),
            ("wait too long", "waits"),
            ("second pass slower", "against pass"),
        )
    }
    oom = sum(run.out_of_memory for each in results for run in each.passes)
    parts = [f"{what} {count}" for what, count in broken.items()]
    return f"{policy}: {len(results)} cases: {', '.join(parts)}; {', '.join(figures)}; {oom} out of memory"


def play(case: Case, count: int) -> list[SimulatedPass]:
    """Return so many passes of the case by its policy."""
    folder, devices = Path(os.environ["GPUYARD_TRACES"]), parse_devices(case.cards)
    return _passes(case.policy, _jobs(case, folder, devices), devices, read_sharing(folder), count)


def run_case(case: Case) -> CaseResult:
    started = time.process_time()
    folder, devices = Path(os.environ["GPUYARD_TRACES"]), parse_devices(case.cards)
    jobs, sharing = _jobs(case, folder, devices), read_sharing(folder)
    [fifo] = _passes("fifo", jobs, devices, sharing, 1)
    first, second = _passes(case.policy, jobs, devices, sharing, 2)
    summary, passes = summarize(fifo, fifo), (summarize(first, fifo), summarize(second, fifo))
    return CaseResult(
        case=case,
        jobs=len(jobs),
        fifo=summary,
        passes=passes,
        broken=broken_promises(summary, passes),
        took_s=time.process_time() - started,
    )


def _passes(
    policy: str, jobs: Sequence[TraceJob], devices: tuple[Device, ...], sharing: Sharing, count: int
) -> list[SimulatedPass]:
    simulation = Simulation(devices, sharing, find_policy(policy))
    passes = [simulation.play(jobs) for _ in range(count)]
    simulation.close()
    return passes


def _jobs(case: Case, folder: Path, devices: tuple[Device, ...]) -> list[TraceJob]:
    count = min(_MOST_JOBS, _JOBS + _JOBS_PER_CARD * len(devices))
    mix, _, kind = case.trace.partition(":")
    if mix == "openb":
        return runnable(read_pods(folder / PODS_FILE, max(sizes_mb(devices)))[0], devices)[:count]
    programs = read_programs(mix.split("+"), folder)
    per_hour = 3600.0 * SATURATED * len(devices) / mean_duration_s(programs)
    jobs = runnable(draw(programs, count, case.seed, per_hour), devices)
    if kind == "burst":
        return [replace(job, at_s=0.0) for job in jobs]
    return harder(jobs, case.seed, max(sizes_mb(devices))) if kind == "hard" else jobs


def _lines(result: CaseResult) -> Iterator[str]:
    case, fifo, passes = result.case, result.fifo, result.passes
    makespan = " ".join(f"{each.makespan_s / fifo.makespan_s:5.2f}" for each in passes)
    completion = " ".join(f"{each.completion_s / fifo.completion_s:5.2f}" for each in passes)
    late = max(each.late_s for each in passes)
    oom, suspensions = (sum(getattr(each, name) for each in passes) for name in ("out_of_memory", "suspensions"))
    mark = "!" if result.broken else " "
    yield (
        f"{case.trace:<18} {case.cards:<8} {case.seed:>4} {result.jobs:>4}  {makespan:>11}  {completion:>11}  "
        f"{late:>6.0f}s  {oom:>3} {suspensions:>4} {sum(each.lost for each in passes):>4} {mark} {result.took_s:5.1f} s"
    )
    yield from (f"    ! {words}" for words in result.broken)
