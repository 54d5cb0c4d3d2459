"""The real controller with jobs on a simulated machine."""

import contextlib
from collections.abc import Iterator, Sequence

import pytest

from gpuyard.model.job import OutcomeKind
from gpuyard.simulated_usage import parse_devices
from gpuyard.simulator.schedule_metrics import SimulatedPass, SimulatedRun
from gpuyard.simulator.simulation import Simulation, find_policy
from gpuyard.simulator.traces import Sharing, TraceJob
from tests.unit.simulator.samples import trace_job


@contextlib.contextmanager
def simulation(policy: str, devices: str = "1x24GB", quantum_s: float = 0.0) -> Iterator[Simulation]:
    found = Simulation(parse_devices(devices), Sharing(), find_policy(policy), quantum_s)
    try:
        yield found
    finally:
        found.close()


def play(policy: str, jobs: Sequence[TraceJob], devices: str = "1x24GB") -> SimulatedPass:
    with simulation(policy, devices) as found:
        return found.play(jobs)


def last_runs(passed: SimulatedPass) -> dict[int, SimulatedRun]:
    return {run.job: run for run in passed.runs}


def outcomes(passed: SimulatedPass) -> list[tuple[int, OutcomeKind]]:
    return [(run.job, run.outcome) for run in passed.runs]


def test_jobs_wait_or_share_as_the_policy_says() -> None:
    runs = last_runs(play("fifo", [trace_job(duration_s=100.0), trace_job(5.0, duration_s=50.0)]))
    assert (runs[0].started_s, runs[0].ended_s) == pytest.approx((0.0, 100.0))
    assert (runs[1].started_s, runs[1].ended_s) == pytest.approx((100.0, 150.0))
    # Declared jobs share a GPU while their sum fits.
    jobs = [trace_job(float(place), declared_mb=10_000.0) for place in range(3)]
    runs = last_runs(play("declared", jobs))
    assert [runs[place].started_s for place in range(2)] == pytest.approx([0.0, 1.0])
    assert runs[2].started_s == pytest.approx(min(runs[0].ended_s, runs[1].ended_s))
    runs = last_runs(play("fifo", [trace_job(gpus=2), trace_job(1.0)], devices="2x24GB"))
    assert sorted(runs[0].devices) == [0, 1]
    assert runs[1].started_s == pytest.approx(600.0), "a job on two GPUs takes both"


def test_an_unknown_job_shares_its_gpu_or_has_it_alone_until_it_was_flat() -> None:
    known = trace_job(1.0, program="python known.py")
    for policy, started_s in (("gpuyard", 1.0), ("gpuyard:quantile=none", 49.5)):
        with simulation(policy) as found:
            found.play([known])
            # Its memory reaches the peak after seven eighths of the ramp.
            runs = last_runs(found.play([trace_job(0.0, ramp_s=20.0), known]))
        assert runs[1].started_s == pytest.approx(started_s, abs=0.1)


def test_unknown_jobs_share_by_what_is_learned() -> None:
    jobs = [trace_job(peak_mb=7000.0), trace_job(peak_mb=7000.0), trace_job(peak_mb=7000.0)]
    with simulation("gpuyard:quantile=none:load=none") as found:
        first, second = found.play(jobs), found.play(jobs)
    assert max(run.started_s for run in first.runs) > 30.0
    assert [run.started_s for run in second.runs] == [0.0, 0.0, 0.0], "the second pass uses the estimates of the first"
    jobs = [trace_job(peak_mb=3000.0, program=f"python {name}.py", ramp_s=20.0) for name in "abcd"]
    with simulation("gpuyard:load=none") as found:
        passed = found.play(jobs)
    assert sorted(run.started_s for run in passed.runs)[2] < 25.0, "unknown jobs share as soon as their memory is flat"
    assert {run.outcome for run in passed.runs} == {OutcomeKind.SUCCEEDED}


def test_a_job_that_runs_out_of_memory_is_run_again_with_more() -> None:
    small = trace_job(peak_mb=2000.0, program="python train.py --small")
    large = trace_job(1000.0, peak_mb=20_000.0, program="python train.py --large", ramp_s=60.0)
    beside = trace_job(999.0, peak_mb=9000.0, declared_mb=9000.0, program="python other.py", duration_s=5000.0)
    with simulation("gpuyard") as found:
        found.play([trace_job(program="python other.py", peak_mb=9000.0), small, small])
        passed = found.play([beside, large])
    assert outcomes(passed) == [(1, OutcomeKind.OUT_OF_MEMORY), (0, OutcomeKind.SUCCEEDED), (1, OutcomeKind.SUCCEEDED)]


def test_an_urgent_job_preempts_another_which_resumes_later() -> None:
    jobs = [
        trace_job(0.0, peak_mb=16_000.0, duration_s=1000.0, ramp_s=10.0),
        trace_job(300.0, peak_mb=20_000.0, duration_s=200.0, urgent=1, priority=10, program="python now.py"),
    ]
    runs = last_runs(play("gpuyard", jobs))
    to_ram_s, back_s = 16_000.0 / (1.6 * 1024), 16_000.0 / (5 * 1024)
    assert runs[1].started_s == pytest.approx(300.0 + to_ram_s, abs=0.1)
    assert runs[0].suspensions == 1
    assert runs[0].paused_s == pytest.approx(to_ram_s + 200.0 + back_s, abs=1.0)
    assert runs[0].ended_s == pytest.approx(1000.0 + runs[0].paused_s, abs=0.1)


def test_memory_of_a_foreign_process_is_not_given_to_jobs() -> None:
    jobs = [
        trace_job(0.0, kind="foreign", peak_mb=20_000.0, duration_s=300.0),
        trace_job(10.0, declared_mb=8000.0, peak_mb=8000.0),
    ]
    passed = play("declared", jobs)
    assert outcomes(passed) == [(1, OutcomeKind.SUCCEEDED)]
    assert passed.runs[0].started_s == pytest.approx(300.0)


def test_a_job_of_several_gpus_is_not_overtaken_by_programs_that_come_later() -> None:
    """None of the programs has run before: the memory of all is unknown."""
    jobs = [
        trace_job(0.0, program="python a.py", duration_s=100.0, peak_mb=14_000.0, load_percent=90.0),
        trace_job(10.0, program="python big.py", duration_s=100.0, peak_mb=9000.0, load_percent=90.0, gpus=2),
        *(
            trace_job(20.0 + place, program=f"python c{place}.py", duration_s=3000.0, peak_mb=14_000.0)
            for place in range(3)
        ),
    ]
    started = {policy: last_runs(play(policy, jobs, "2x24GB"))[1].started_s for policy in ("fifo", "gpuyard")}
    assert started["gpuyard"] <= started["fifo"] == pytest.approx(100.0)


@pytest.mark.parametrize("policy", ["fifo", "declared", "gpuyard"])
def test_the_same_trace_gives_the_same_result(policy: str) -> None:
    jobs = [
        trace_job(
            7.0 * place, peak_mb=1000.0 * (1 + place * 7 % 20), program=f"python {place % 3}.py",
            declared_mb=4000.0, duration_s=50.0 + 13 * place % 400,
        )
        for place in range(40)
    ]  # fmt: skip
    assert play(policy, jobs, "2x24GB").runs == play(policy, jobs, "2x24GB").runs


def test_a_quantum_and_progress() -> None:
    jobs = [trace_job(float(place), duration_s=100.0, declared_mb=1000.0, peak_mb=1000.0) for place in range(20)]
    with simulation("declared") as exact, simulation("declared", quantum_s=10.0) as coarse:
        fine, summed_up = exact.play(jobs), coarse.play(jobs)
    assert len(summed_up.runs) == len(fine.runs) == 20
    assert summed_up.steps < fine.steps / 2, "a quantum combines the events within it"
    progress: list[int] = []
    with simulation("fifo") as found:
        found.play([trace_job(), trace_job()], progress.append)
    assert progress[-1] == 2
    assert progress == sorted(progress), "progress is reported up to the last job"


def test_a_program_that_imports_holds_no_memory_and_slows_no_other() -> None:
    first = trace_job(program="python a.py", load_percent=100.0, duration_s=100.0)
    second = trace_job(program="python b.py", load_percent=100.0, duration_s=100.0, start_s=60.0)
    passed = play("gpuyard", [first, second], "1x80GB")
    runs = last_runs(passed)
    assert runs[1].started_s == 0.0
    # The first is alone for a minute, then both have half of the device.
    assert runs[0].ended_s == pytest.approx(60.0 + 40.0 / 0.5, rel=0.01)
    assert passed.memory_mb_s == pytest.approx(4000.0 * (runs[0].ended_s + runs[1].ended_s - 60.0), rel=0.01)
