"""Sharing pays on each mix and machine: on average over several seeds, a first pass is no slower than one job per GPU,
and a second pass, with everything learned, no slower than the first. On a single trace neither can be promised."""

import contextlib
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from bench.against_fifo import PassSummary, broken_means, summarize
from gpuyard.simulated_usage import parse_devices
from gpuyard.simulator.compare_policies import SATURATED
from gpuyard.simulator.schedule_metrics import SimulatedPass
from gpuyard.simulator.simulation import Simulation, find_policy
from gpuyard.simulator.traces import MeasuredProgram, Sharing, TraceJob, draw, mean_duration_s
from tests.scale import some

GB = 1024.0
SEEDS = range(1, 13)  # single seeds differ by 4 to 9%


def program(name: str, memory_gb: float, load_percent: float, minutes: float) -> MeasuredProgram:
    return MeasuredProgram(
        command=f"python {name}.py", memory_mb=memory_gb * GB, load_percent=load_percent, kind=name,
        duration_s=60.0 * minutes,
    )  # fmt: skip


BUSY = [
    program("resnet", 6, 100, 50), program("bert", 16, 100, 58), program("unet", 9, 95, 35), program("gpt", 13, 99, 28),
    program("vit", 5, 90, 48), program("yolo", 4, 85, 25), program("mnist", 1, 80, 1), program("probe", 1, 60, 2),
]  # fmt: skip
LIGHT = [
    program("ppo", 2, 12, 30), program("dlrm", 3, 25, 18), program("lstm", 2, 35, 40), program("gan", 3, 55, 22),
    program("tabular", 1, 10, 6), program("crnn", 4, 45, 12),
]  # fmt: skip
MIXES = {"busy": BUSY, "light": LIGHT, "both": [*BUSY, *LIGHT]}


def jobs_of(mix: str, cards: int, seed: int) -> list[TraceJob]:
    programs = MIXES[mix.removesuffix(" at once")]
    per_hour = 3600.0 * SATURATED * cards / mean_duration_s(programs)
    jobs = draw(programs, 12 + 8 * cards, seed, per_hour)
    return [replace(job, at_s=0.0) for job in jobs] if mix.endswith(" at once") else jobs


def passes(policy: str, jobs: Sequence[TraceJob], devices: str, count: int) -> list[SimulatedPass]:
    with contextlib.closing(Simulation(parse_devices(devices), Sharing(), find_policy(policy))) as simulation:
        return [simulation.play(jobs) for _ in range(count)]


def compared(policy: str, mix: str, devices: str, seed: int) -> tuple[PassSummary, ...]:
    """Return fifo, and the first and second pass of the policy."""
    jobs = jobs_of(mix, len(parse_devices(devices)), seed)
    [alone] = passes("fifo", jobs, devices, 1)
    return tuple(summarize(each, alone) for each in (alone, *passes(policy, jobs, devices, 2)))


@pytest.mark.parametrize(("mix", "devices"), some([("both", "2x24GB"), ("busy", "4x24GB")], 0))
def test_neither_pass_is_slower_on_average(mix: str, devices: str) -> None:
    assert broken_means([compared("gpuyard", mix, devices, seed) for seed in SEEDS]) == []


def one(name: str, at_min: float, minutes: float, memory_gb: float, load_percent: float = 100.0) -> TraceJob:
    return TraceJob(
        at_s=60.0 * at_min, program=f"python {name}.py", duration_s=60.0 * minutes, peak_mb=memory_gb * GB,
        load_percent=load_percent,
    )  # fmt: skip


def test_to_share_makes_one_trace_faster_than_fifo_and_another_slower() -> None:
    """The third job joins one that runs, or waits for a card of its own. The second ends after an hour or after three
    minutes; until then nothing tells which. A policy that is never slower than fifo lets the third one wait in both."""
    for minutes, is_faster in ((60, True), (3, False)):
        jobs = [one(name, at, each, 4, 70.0) for name, at, each in (("a", 0, 60), ("b", 0, minutes), ("c", 1, 60))]
        [alone], [shared] = (passes(policy, jobs, "2x24GB", 1) for policy in ("fifo", "gpuyard"))
        ratio = summarize(shared, alone).makespan_s / summarize(alone, alone).makespan_s
        assert (ratio < 0.8) == is_faster
        assert (ratio > 1.2) == (not is_faster)
