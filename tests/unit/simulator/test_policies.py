"""Parsing policies: their names and options."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuyard.errors import UserError
from gpuyard.model.job import OutcomeKind
from gpuyard.model.lease import FixedMemory
from gpuyard.simulated_usage import parse_devices
from gpuyard.simulator.compare_policies import sizes_mb
from gpuyard.simulator.schedule_metrics import lower_bound, measure_pass
from gpuyard.simulator.simulation import Simulation, find_policy
from gpuyard.simulator.traces import Sharing, TraceJob
from tests.scale import size
from tests.unit.simulator.samples import trace_job


def test_a_policy_can_be_varied() -> None:
    policy = find_policy("gpuyard:load=120:quantile=0.95:jobs=3")
    assert policy.name == "gpuyard:load=120:quantile=0.95:jobs=3"
    assert policy.learns
    assert policy.rules.packing.sureness == pytest.approx(1.645, abs=0.001)
    assert (policy.rules.packing.max_load_percent, policy.rules.packing.max_jobs_per_device) == (120.0, 3)
    assert find_policy("gpuyard:load=none").rules.packing.max_load_percent is None
    assert policy.rules.shares_first_runs
    assert not find_policy("gpuyard:quantile=none").rules.shares_first_runs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lifo", "there is no policy 'lifo'"),
        ("gpuyard:colour=3", "'colour=3' is not an option of a policy"),
        ("gpuyard:load=much", "'load=much' needs a number of 0 or more"),
        ("gpuyard:jobs=-1", "'jobs=-1' needs a number of 0 or more"),
        ("gpuyard:quantile=1", "'quantile=1' is not a quantile"),
        ("gpuyard:load=1.2.3", "'load=1.2.3' needs a number of 0 or more"),
    ],
)
def test_unknown_policies_and_options_are_rejected(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_policy(text)


def test_without_a_declaration_a_job_gets_whole_gpus_and_declarations_are_capped() -> None:
    policy = find_policy("declared")
    assert policy.need_of(trace_job(), 24_576.0).is_exclusive
    shared = policy.need_of(trace_job(declared_mb=30_000.0), 24_576.0)
    assert shared.memory == FixedMemory(24_576.0)


SHARING = Sharing({("a", "b"): 0.7, ("b", "a"): 0.5, ("a", "a"): 0.55}, {"a": 90.0, "b": 60.0})


@st.composite
def trace_jobs(draw: st.DrawFn) -> TraceJob:
    duration_s = draw(st.sampled_from([30.0, 200.0, 1500.0]))
    peak_mb = draw(st.sampled_from([500.0, 6000.0, 9000.0, 14_000.0, 24_000.0]))
    is_late = draw(st.booleans())
    return trace_job(
        draw(st.sampled_from([0.0, 0.0, 10.0, 300.0])),
        peak_mb=peak_mb,
        duration_s=duration_s,
        program=draw(st.sampled_from(["a.py", "b.py", "c.py"])),
        load_percent=draw(st.sampled_from([5.0, 50.0, 100.0])),
        kind=draw(st.sampled_from(["a", "b", ""])),
        declared_mb=peak_mb,
        gpus=draw(st.sampled_from([1, 1, 1, 2])),
        ramp_s=draw(st.sampled_from([0.0, 20.0])),
        late_s=duration_s * 0.8 if is_late else None,
        late_mb=peak_mb * 0.3 if is_late else 0.0,
    )


@settings(max_examples=size(15, full=40), deadline=None)
@given(
    st.lists(trace_jobs(), min_size=1, max_size=10).map(lambda jobs: sorted(jobs, key=lambda job: job.at_s)),
    st.sampled_from(["fifo", "declared", "gpuyard", "gpuyard:load=none:quantile=none"]),
)
def test_no_policy_beats_the_bound_or_loses_a_job(jobs: list[TraceJob], policy: str) -> None:
    devices = parse_devices("2x24GB")
    bound = lower_bound(jobs, sizes_mb(devices), SHARING)
    simulation = Simulation(devices, SHARING, find_policy(policy))
    try:
        for number in (1, 2):
            passed = simulation.play(jobs)
            figures = measure_pass(policy, number, passed, bound)
            assert figures.lost == 0
            assert figures.makespan_s >= bound.makespan_s - 0.01
            done = [run.job for run in passed.runs if run.outcome is OutcomeKind.SUCCEEDED]
            assert sorted(done) == list(range(len(jobs)))
    finally:
        simulation.close()


@pytest.mark.parametrize(
    ("jobs", "makespan_s", "reason"),
    [
        ([trace_job(100.0, duration_s=600.0)], 600.0, "the longest job"),
        ([trace_job(0.0, duration_s=60.0), trace_job(100.0, duration_s=600.0)], 700.0, "the longest job"),
        ([trace_job(load_percent=90.0, duration_s=600.0)] * 4, 1080.0, "compute"),
        ([trace_job(load_percent=10.0, peak_mb=12_288.0, duration_s=600.0)] * 8, 1200.0, "memory"),
        ([trace_job(load_percent=10.0, peak_mb=13_000.0)] * 4, 1200.0, "jobs that fit beside few others"),
    ],
)
def test_the_bound_names_its_reason(jobs: list[TraceJob], makespan_s: float, reason: str) -> None:
    bound = lower_bound(jobs, [24_576.0, 24_576.0], Sharing())
    assert bound.makespan_s == pytest.approx(makespan_s)
    assert bound.reason == reason


def test_foreign_processes_do_not_count_as_work() -> None:
    assert lower_bound([trace_job(kind="foreign")], [24_576.0], Sharing()).makespan_s == 0.0
