"""No job waits more than twice as long as with one job per GPU, first in first out, and ten minutes; but for first runs
that take more memory late, which no policy can promise that lets others go on beside them."""

import contextlib
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from bench.against_fifo import summarize
from gpuyard.simulated_usage import parse_devices
from gpuyard.simulator.schedule_metrics import SimulatedPass
from gpuyard.simulator.simulation import Simulation, find_policy
from gpuyard.simulator.traces import Sharing, TraceJob

GB = 1024.0


def one(name: str, at_min: float, minutes: float, memory_gb: float, load_percent: float = 10.0) -> TraceJob:
    return TraceJob(
        at_s=60.0 * at_min, program=f"python {name}.py", duration_s=60.0 * minutes, peak_mb=memory_gb * GB,
        load_percent=load_percent,
    )  # fmt: skip


def last_pass(policy: str, devices: str, *traces: Sequence[TraceJob]) -> SimulatedPass:
    """Return the pass over the last of the traces, with what was learned from those before."""
    with contextlib.closing(Simulation(parse_devices(devices), Sharing(), find_policy(policy))) as simulation:
        return [simulation.play(jobs) for jobs in traces][-1]


def test_a_run_that_takes_longer_than_the_one_before_does_not_keep_a_large_job_waiting() -> None:
    """Two cards; the job on the first one should have ended, but takes five times as long as the last time. Meanwhile
    no long job joins the second card, on which the large one starts."""
    learned = [one("first", 0, 30, 4), one("second", 40, 40, 4), one("large", 90, 5, 20), one("long", 100, 100, 4)]
    jobs = [one("first", 0, 150, 4), one("second", 0, 40, 4), one("large", 20, 5, 20), *[one("long", 32, 100, 4)] * 3]
    shared, alone = (last_pass(policy, "2x24GB", learned, jobs) for policy in ("gpuyard", "fifo"))
    assert summarize(shared, alone).late_s <= 0.0


def test_the_time_in_which_a_job_is_suspended_counts_as_waiting() -> None:
    alone = last_pass("fifo", "1x24GB", [one("a", 0, 60, 8)])
    [run] = alone.runs
    suspended = replace(alone, runs=[replace(run, paused_s=601.0, ended_s=run.ended_s + 601.0)])
    assert summarize(suspended, alone).late_s == pytest.approx(1.0)


def test_a_first_run_that_may_grow_late_either_shares_or_keeps_its_promise() -> None:
    """After half an hour the first job takes more memory than the card has beside the second, or it never does. Until
    then nothing tells which: a policy that lets both go on gains on one trace and breaks the promise on the other. One
    that keeps the promise on both suspends the second one while the first may grow (ADR 99)."""
    flat, second = one("flat", 0, 60, 8), one("second", 1, 60, 8)
    grows = replace(flat, peak_mb=20 * GB, late_mb=12 * GB, late_s=1800.0)
    for first, is_late in ((flat, False), (grows, True)):
        jobs = [first, second]
        shared, alone = (last_pass(policy, "1x24GB", jobs) for policy in ("gpuyard", "fifo"))
        sharing, fifo = (summarize(each, alone) for each in (shared, alone))
        assert (sharing.late_s > 0.0) == is_late
        assert (sharing.makespan_s < 0.6 * fifo.makespan_s) == (not is_late)
