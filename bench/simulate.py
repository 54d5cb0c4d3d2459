"""Gain by packing with learned memory, in simulated time: measured mixes on 4 and 8 cards of 24, 40 and 80 GB.

Compared with one job per GPU and with the lower bound, for a first and a second pass of the programs; then with
programs that are hard to predict; and the time that the simulation of a very large machine takes. The measured programs
are published by others: GPUYARD_TRACES names their folder.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from msgspec.structs import replace

from gpuyard.model.machine_snapshot import Device
from gpuyard.simulated_usage import parse_devices
from gpuyard.simulator.compare_policies import SATURATED, default_quantum_s, runnable, sizes_mb
from gpuyard.simulator.schedule_metrics import PolicyMetrics, lower_bound, measure_pass
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

MIXES = (("lucid",), ("carma",), ("lucid", "carma"))
CARDS = ("4x24GB", "4x40GB", "4x80GB", "8x24GB", "8x40GB", "8x80GB")
JOBS = 400
STEPPED_JOBS = 400
MANY_JOBS, MANY_CARDS = 1_000_000, "1000x24GB"
_HEAD = f"{'mix':<12} {'cards':<7} {'jobs':>4}  {'fifo':>6}  {'first':>6} {'gain':>5} {'/bound':>6} {'oom':>8}  "


def bench_simulate(arguments: Sequence[str]) -> None:
    """`arguments` are seeds, `million` for only the largest machine, or `steps` for only the cost of a step."""
    folder = os.environ.get("GPUYARD_TRACES")
    if folder is None:
        print("no simulation: set GPUYARD_TRACES to a folder of measured programs")
    elif list(arguments) == ["million"]:
        _million(Path(folder))
    elif list(arguments) == ["steps"]:
        _steps(Path(folder))
    else:
        for seed in map(int, arguments or ["1"]):
            _mixes(Path(folder), seed, is_hard=False)
            _mixes(Path(folder), seed, is_hard=True)


def _mixes(folder: Path, seed: int, *, is_hard: bool) -> None:
    sharing = read_sharing(folder)
    print(f"\nseed {seed}, {'hard to predict' if is_hard else 'as measured'}")
    print(f"{_HEAD}{'second':>6} {'gain':>5} {'/bound':>6} {'oom':>8}  lost  at best")
    for mix in MIXES:
        for cards in CARDS:
            devices = parse_devices(cards)
            jobs = _draw(folder, mix, JOBS, seed, devices)
            jobs = harder(jobs, seed, max(sizes_mb(devices))) if is_hard else jobs
            fifo, ours = _passes("fifo", jobs, devices, sharing), _passes("gpuyard", jobs, devices, sharing)
            print(_row("+".join(mix), cards, fifo[0], ours), flush=True)


def _row(mix: str, cards: str, fifo: PolicyMetrics, ours: Sequence[PolicyMetrics]) -> str:
    """Return a line of the table; `at best` is the gain of the bound itself."""
    cells = [f"{mix:<12} {cards:<7} {fifo.jobs:>4}  {fifo.makespan_s / 3600:>5.1f}h"]
    for each in ours:
        gain = 1 - each.makespan_s / fifo.makespan_s
        oom = f"{each.out_of_memory}/{each.starts}"
        cells.append(f"{each.makespan_s / 3600:>5.1f}h {gain:>5.0%} {each.over_bound:>6.2f} {oom:>8}")
    return "  ".join([*cells, f"{sum(each.lost for each in ours):>4}", f"{1 - fifo.bound_s / fifo.makespan_s:>7.0%}"])


def _passes(
    policy: str, jobs: Sequence[TraceJob], devices: tuple[Device, ...], sharing: Sharing
) -> list[PolicyMetrics]:
    bound = lower_bound(jobs, sizes_mb(devices), sharing)
    simulation = Simulation(devices, sharing, find_policy(policy))
    figures = [measure_pass(policy, number, simulation.play(jobs), bound) for number in (1, 2)]
    simulation.close()
    return figures


def _draw(folder: Path, mix: Sequence[str], count: int, seed: int, devices: tuple[Device, ...]) -> list[TraceJob]:
    programs = read_programs(mix, folder)
    per_hour = 3600.0 * SATURATED * len(devices) / mean_duration_s(programs)
    return runnable(draw(programs, count, seed, per_hour), devices)


def harder(jobs: Sequence[TraceJob], seed: int, card_mb: float) -> list[TraceJob]:
    """Return jobs that are harder to predict: memory varies by up to 10%, one run in five allocates up to 40% of its
    memory late, and one program in twenty takes ten times as much with some inputs as with others."""
    random = Random(seed)
    programs = sorted({job.program for job in jobs})
    fickle = set(random.sample(programs, max(1, len(programs) // 20)))
    return [_hard(job, random, card_mb, is_fickle=job.program in fickle) for job in jobs]


def _hard(job: TraceJob, random: Random, card_mb: float, *, is_fickle: bool) -> TraceJob:
    peak_mb = min(0.98 * card_mb, job.peak_mb * random.uniform(0.9, 1.1))
    if random.random() < 0.5 and is_fickle:
        peak_mb /= 10
    late, when = random.uniform(0.1, 0.4), random.uniform(0.2, 0.9)
    if random.random() >= 0.2:
        return replace(job, peak_mb=peak_mb, late_s=None, late_mb=0.0)
    return replace(job, peak_mb=peak_mb, late_s=job.duration_s * when, late_mb=peak_mb * late)


def _million(folder: Path) -> None:
    devices, sharing = parse_devices(MANY_CARDS), read_sharing(folder)
    jobs = _draw(folder, ("lucid",), MANY_JOBS, 1, devices)
    bound = lower_bound(jobs, sizes_mb(devices), sharing)
    simulation = Simulation(devices, sharing, find_policy("gpuyard"), default_quantum_s(jobs))
    started = time.perf_counter()
    passed = simulation.play(jobs, _progress(started))
    taken = time.perf_counter() - started
    figures = measure_pass("gpuyard", 1, passed, bound)
    simulation.close()
    print(
        f"{len(jobs):,} jobs on {MANY_CARDS} in {taken / 60:.1f} minutes, {passed.steps:,} steps: makespan "
        f"{figures.makespan_s / 86_400:.1f} days, {figures.over_bound:.2f} times the bound, "
        f"{figures.out_of_memory} out of memory, {figures.lost} lost"
    )


def _steps(folder: Path) -> None:
    """Print what a step costs with pods of one and of several GPUs, as a multiple of a step of fifo on 4 cards."""
    floor_s: float | None = None
    for policy in ("fifo", "gpuyard"):
        for cards in ("4x24GB", "40x24GB"):
            devices = parse_devices(cards)
            jobs = runnable(read_pods(folder / PODS_FILE, max(sizes_mb(devices)))[0], devices)[:STEPPED_JOBS]
            simulation = Simulation(devices, read_sharing(folder), find_policy(policy))
            started = time.process_time()
            steps = simulation.play(jobs).steps
            taken_s = time.process_time() - started
            simulation.close()
            floor_s = floor_s or taken_s / steps
            print(
                f"{policy:<8} {cards:<8} {len(jobs)} jobs, {steps:,} steps: {1e3 * taken_s / steps:.2f} ms a step "
                f"({taken_s / steps / floor_s:.1f} times), {1e3 * taken_s / len(jobs):.1f} ms a job"
            )


def _progress(started: float) -> Callable[[int], None]:
    last_printed = 0

    def print_progress(ended: int) -> None:
        nonlocal last_printed
        if ended >= last_printed + 100_000:
            last_printed = ended
            print(f"{ended:>9,} in {time.perf_counter() - started:.0f} s", flush=True)

    return print_progress
