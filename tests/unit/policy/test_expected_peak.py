"""What to expect of a job without an estimate: before it runs, while it climbs, and of several together."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.policy.device_state import margin_mb
from gpuyard.policy.estimates import (
    FLAT_S,
    ExpectedPeak,
    Moments,
    assumed_peak,
    learn_climb,
    missing_part,
    narrowed,
    peak_while_running,
    sureness_of,
)
from gpuyard.policy.numbers import MACHINE_WEIGHT, PROGRAM_WEIGHT

GB = 1024.0
sizes = st.floats(100.0, 200 * GB)
peaks = st.lists(st.floats(0.0, 100 * GB), max_size=32)


def test_without_any_run_a_part_of_the_device_is_assumed() -> None:
    assert assumed_peak(8 * GB) == ExpectedPeak(2 * GB, 2 * GB)
    assert assumed_peak(141 * GB) == ExpectedPeak(6 * GB, 6 * GB)


def test_one_run_of_the_program_counts_more_than_one_of_another() -> None:
    assumed = assumed_peak(24 * GB)
    other, own = (narrowed(assumed, (12 * GB,), weight) for weight in (MACHINE_WEIGHT, PROGRAM_WEIGHT))
    assert assumed.mean_mb < other.mean_mb < own.mean_mb < 12 * GB


@given(peaks, sizes)
def test_many_alike_runs_leave_little_spread_and_few_leave_more(found: list[float], size: float) -> None:
    assumed = assumed_peak(size)
    expected = narrowed(assumed, tuple(found), PROGRAM_WEIGHT)
    low, high = min((*found, assumed.mean_mb)), max((*found, assumed.mean_mb))
    assert low - 1e-3 <= expected.mean_mb <= high + 1e-3
    alike = narrowed(assumed_peak(24 * GB), (2 * GB,) * 30, PROGRAM_WEIGHT)
    assert alike.at_most_mb(1.28) < 5 * GB < narrowed(assumed_peak(24 * GB), (2 * GB,), PROGRAM_WEIGHT).at_most_mb(1.28)


def test_the_missing_part_shrinks_while_memory_is_flat() -> None:
    means = [missing_part(flat_s, ())[0] for flat_s in (0.0, *FLAT_S)]
    assert means == sorted(set(means), reverse=True)
    assert missing_part(1.5, ()) == missing_part(1.0, ())


def test_what_climbs_missed_is_learned_per_machine_and_per_program() -> None:
    steady = learn_climb((), (1000.0,), 1000.0)
    late = learn_climb((), (100.0,), 1000.0)
    for _ in range(30):
        steady, late = learn_climb(steady, (1000.0,), 1000.0), learn_climb(late, (100.0,), 1000.0)
    assumed, _ = missing_part(1.0, ())
    assert missing_part(1.0, (steady,))[0] < 0.1 < assumed < 0.7 < missing_part(1.0, (steady, late))[0]
    assert missing_part(2.0, (steady, late)) == missing_part(2.0, ()), "these runs were never flat for so long"
    assert missing_part(0.5, (late,)) == missing_part(0.5, ())


def test_a_climb_keeps_the_times_that_a_shorter_run_did_not_reach() -> None:
    longer = learn_climb((), (500.0, 1000.0), 1000.0)
    both = learn_climb(longer, (1000.0,), 1000.0)
    assert [moments.count for moments in both] == [2.0, 1.0]
    assert learn_climb(longer, (0.0,), 0.0) == longer


def test_older_runs_fade() -> None:
    moments = Moments()
    for _ in range(200):
        moments = moments.plus(1.0)
    for _ in range(100):
        moments = moments.plus(0.0)
    assert moments.count == pytest.approx(33.0, abs=1.0)
    assert moments.total < 5.0


@given(sizes, st.floats(0.0, 100 * GB), st.sampled_from((0.0, *FLAT_S)))
def test_a_running_job_is_expected_to_need_at_least_what_it_holds(size: float, level_mb: float, flat_s: float) -> None:
    before = assumed_peak(size)
    expected = peak_while_running(level_mb, missing_part(flat_s, ()), before)
    assert expected.mean_mb >= level_mb
    assert expected.mean_mb <= level_mb + max(level_mb, before.mean_mb)


def test_several_jobs_need_less_than_each_may_need_at_worst() -> None:
    one = margin_mb(6 * GB, (6 * GB) ** 2, 1.28)
    assert one == pytest.approx(1.28 * 6 * GB)
    four = margin_mb(24 * GB, 4 * (6 * GB) ** 2, 1.28)
    assert 2 * one < four < 3 * one


@given(st.floats(0.5, 0.999))
def test_sureness_is_the_normal_quantile(quantile: float) -> None:
    assert sureness_of(quantile) == pytest.approx(statistics.NormalDist().inv_cdf(quantile), abs=1e-3)
