"""Sharing costs no more than one job per GPU would: on the day on which all programs are new, and later."""

import contextlib
from collections.abc import Sequence
from random import Random

import pytest
from msgspec.structs import replace

from bench.against_fifo import PassSummary, broken_means, broken_promises, summarize
from gpuyard.model.job import OutcomeKind
from gpuyard.simulated_usage import parse_devices
from gpuyard.simulator.schedule_metrics import SimulatedPass, SimulatedRun
from gpuyard.simulator.simulation import Simulation, find_policy
from gpuyard.simulator.traces import Sharing, TraceJob
from tests.unit.simulator.samples import trace_job


def passes(policy: str, jobs: Sequence[TraceJob], devices: str, count: int) -> list[SimulatedPass]:
    with contextlib.closing(Simulation(parse_devices(devices), Sharing(), find_policy(policy))) as simulation:
        return [simulation.play(jobs) for _ in range(count)]


def short_programs() -> list[TraceJob]:
    """One script with other arguments each time, and a few other programs, submitted together."""
    random = Random(1)
    return [
        trace_job(
            program=f"python {'train.py' if at % 3 else f'other{at}.py'} --size {at}",
            peak_mb=random.uniform(1000.0, 10_000.0),
            duration_s=random.uniform(20.0, 60.0),
            load_percent=random.uniform(20.0, 60.0),
            start_s=random.uniform(2.0, 6.0),
            ramp_s=random.uniform(2.0, 8.0),
        )
        for at in range(12)
    ]


def long_programs() -> list[TraceJob]:
    """Programs of several lengths that arrive one by one; one in four takes its last memory late."""
    random, jobs = Random(2), []
    for at in range(16):
        job = trace_job(
            60.0 * at, program=f"python model{at % 5}.py --seed {at}", peak_mb=random.uniform(2000.0, 12_000.0),
            duration_s=random.uniform(300.0, 1200.0), load_percent=random.uniform(30.0, 90.0), start_s=10.0,
            ramp_s=20.0,
        )  # fmt: skip
        jobs.append(job if at % 4 else replace(job, late_s=200.0, late_mb=1000.0))
    return jobs


@pytest.mark.parametrize(
    ("jobs", "devices", "gain", "disturbed"),
    [
        (short_programs(), "1x141GB", 0.45, 0.1),
        (short_programs(), "1x24GB", 0.8, 0.1),
        (long_programs(), "2x24GB", 0.9, 0.2),  # its late growth cannot be foreseen, and the guard acts on it
    ],
)
def test_even_the_first_pass_is_faster(jobs: list[TraceJob], devices: str, gain: float, disturbed: float) -> None:
    [alone] = passes("fifo", jobs, devices, 1)
    fifo = summarize(alone, alone)
    [first] = (summarize(each, alone) for each in passes("gpuyard", jobs, devices, 1))
    assert broken_promises(fifo, [first]) == []
    assert first.makespan_s <= gain * fifo.makespan_s
    assert first.disturbed <= disturbed


def one_run(job: TraceJob, started_s: float, ended_s: float) -> SimulatedPass:
    run = SimulatedRun(
        job=0, started_s=started_s, ended_s=ended_s, devices=(0,), outcome=OutcomeKind.SUCCEEDED, done_s=job.duration_s
    )
    return SimulatedPass(jobs=[job], runs=[run], devices_mb=[24_576.0], memory_mb_s=0.0, compute_s=0.0)


def judged(fifo: SimulatedPass, *others: SimulatedPass) -> list[str]:
    summaries: list[PassSummary] = [summarize(each, fifo) for each in (fifo, *others)]
    return broken_promises(summaries[0], summaries[1:])


def test_a_pass_that_costs_more_is_named() -> None:
    job = trace_job(100.0, duration_s=1000.0)
    fifo = one_run(job, 200.0, 1200.0)
    assert judged(fifo, one_run(job, 150.0, 1150.0), one_run(job, 100.0, 1100.0)) == []
    assert judged(fifo, one_run(job, 899.0, 1100.0)) == []
    assert judged(fifo, one_run(job, 901.0, 1100.0)) == ["pass 1: job 0 waits 1 s too long"]
    assert judged(fifo, one_run(job, 150.0, 1310.0)) == [
        "pass 1: makespan +10.0% against fifo",
        "pass 1: completion +10.0% against fifo",
    ]
    assert judged(fifo, one_run(job, 150.0, 1100.0), one_run(job, 150.0, 1200.0))[0] == (
        "pass 2: makespan +10.0% against pass 1"
    )
    lost = replace(fifo, runs=[replace(fifo.runs[0], outcome=OutcomeKind.OUT_OF_MEMORY)])
    assert judged(fifo, lost) == ["pass 1: 1 jobs lost"]


def summary(makespan_s: float, completion_s: float = 100.0) -> PassSummary:
    return PassSummary(
        makespan_s=makespan_s, completion_s=completion_s, late_job=0, late_s=0.0, late_jobs=0, starts=1,
        out_of_memory=0, suspensions=0, lost=0,
    )  # fmt: skip


def test_means_over_seeds_are_judged_with_a_tolerance() -> None:
    fifo = summary(1000.0)
    one_slower = [(fifo, summary(900.0), summary(950.0)), (fifo, summary(900.0), summary(860.0))]
    assert broken_means(one_slower) == []
    both_slower = [(fifo, summary(1060.0), summary(900.0)), (fifo, summary(1000.0), summary(900.0))]
    assert broken_means(both_slower) == ["pass 1: makespan +3.0% against fifo on average"]
    assert broken_means([(fifo, fifo, summary(1000.0, 110.0))]) == [
        "pass 2: completion +10.0% against pass 1 on average"
    ]


def test_late_jobs_are_counted() -> None:
    job = trace_job(100.0, duration_s=1000.0)
    fifo = one_run(job, 200.0, 1200.0)
    assert summarize(one_run(job, 899.0, 1100.0), fifo).late_jobs == 0
    assert summarize(one_run(job, 901.0, 1100.0), fifo).late_jobs == 1
