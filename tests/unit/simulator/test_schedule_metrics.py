"""The metrics of a simulated pass."""

import pytest

from gpuyard.model.job import OutcomeKind
from gpuyard.simulator.schedule_metrics import MakespanBound, SimulatedPass, SimulatedRun, measure_pass, percentile
from tests.unit.simulator.samples import trace_job

BOUND = MakespanBound(longest_s=100.0, compute_s=150.0, memory_s=20.0, crowding_s=10.0)


def run(
    job: int, started_s: float, ended_s: float, outcome: OutcomeKind = OutcomeKind.SUCCEEDED, **more: float
) -> SimulatedRun:
    return SimulatedRun(
        job=job, started_s=started_s, ended_s=ended_s, devices=(0,), outcome=outcome, done_s=ended_s - started_s,
        paused_s=more.get("paused_s", 0.0), suspensions=int(more.get("suspensions", 0)),
    )  # fmt: skip


def test_the_metrics_of_a_pass() -> None:
    jobs = [trace_job(10.0), trace_job(20.0), trace_job(30.0), trace_job(0.0, kind="foreign")]
    runs = [
        run(0, 10.0, 110.0),
        run(1, 40.0, 60.0, OutcomeKind.OUT_OF_MEMORY),
        run(1, 60.0, 80.0, OutcomeKind.PREEMPTED),
        run(1, 120.0, 310.0, paused_s=15.0, suspensions=1),
        run(2, 50.0, 51.0, OutcomeKind.FAILED),
    ]
    passed = SimulatedPass(jobs=jobs, runs=runs, devices_mb=(1000.0, 3000.0), memory_mb_s=600_000.0, compute_s=150.0)
    figures = measure_pass("gpuyard", 2, passed, BOUND)
    assert (figures.jobs, figures.lost, figures.starts) == (3, 1, 5)
    assert figures.makespan_s == 300.0
    assert figures.over_bound == pytest.approx(2.0)
    assert (figures.mean_wait_s, figures.p99_wait_s) == (50.0, 100.0)
    assert (figures.mean_completion_s, figures.p99_completion_s) == (195.0, 290.0)
    assert (figures.memory_percent, figures.compute_percent) == (50.0, 25.0)
    assert (figures.out_of_memory, figures.requeues, figures.suspensions) == (1, 1, 1)
    assert (figures.preempted_s, figures.wasted_s) == (15.0 + 20.0, 20.0 + 20.0 + 1.0)


def test_a_pass_without_work_has_metrics() -> None:
    passed = SimulatedPass(jobs=[trace_job()], runs=[], devices_mb=(1000.0,), memory_mb_s=0.0, compute_s=0.0)
    figures = measure_pass("fifo", 1, passed, BOUND)
    assert (figures.lost, figures.makespan_s, figures.mean_wait_s) == (1, 0.0, 0.0)


@pytest.mark.parametrize(("part", "value"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.001, 1)])
def test_a_percentile_is_the_smallest_value_that_this_part_does_not_exceed(part: float, value: int) -> None:
    assert percentile([float(each) for each in range(1, 101)], part) == value
