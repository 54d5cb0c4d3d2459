import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.policy.foreign_load import Smoothed, smooth
from gpuyard.policy.numbers import FORGET_AFTER_HALF_LIVES

HALF_LIFE = 5.0
readings = st.floats(0, 100)


def test_the_first_reading_counts_whole() -> None:
    assert smooth(Smoothed(), 80.0, 10.0, HALF_LIFE) == Smoothed(value=80.0, at=10.0)


def test_after_one_half_life_the_old_and_the_new_count_alike() -> None:
    before = Smoothed(value=0.0, at=0.0)
    assert smooth(before, 100.0, HALF_LIFE, HALF_LIFE).value == pytest.approx(50.0)


@given(start=readings, level=readings, cuts=st.lists(st.floats(0.01, 5), min_size=1, max_size=8))
def test_a_steady_level_gives_the_same_average_however_often_it_is_sampled(
    start: float, level: float, cuts: list[float]
) -> None:
    at_once = smooth(Smoothed(value=start, at=0.0), level, sum(cuts), HALF_LIFE)
    often, now = Smoothed(value=start, at=0.0), 0.0
    for cut in cuts:
        now += cut
        often = smooth(often, level, now, HALF_LIFE)
    assert often.value == pytest.approx(at_once.value, abs=1e-6)


@given(st.lists(st.tuples(readings, st.floats(0, 60)), min_size=1, max_size=20))
def test_the_average_stays_within_the_readings(samples: list[tuple[float, float]]) -> None:
    average, now = Smoothed(), 0.0
    for reading, elapsed in samples:
        now += elapsed
        average = smooth(average, reading, now, HALF_LIFE)
    values = [reading for reading, _ in samples]
    assert average.value is not None
    assert min(values) - 1e-9 <= average.value <= max(values) + 1e-9


def test_unknown_is_no_zero_and_is_remembered_only_for_a_while() -> None:
    before = Smoothed(value=90.0, at=0.0)
    assert smooth(before, None, 1.0, HALF_LIFE).value == 90.0
    assert smooth(before, None, FORGET_AFTER_HALF_LIVES * HALF_LIFE + 0.1, HALF_LIFE).value is None
    assert smooth(Smoothed(), None, 1.0, HALF_LIFE) == Smoothed()


def test_without_a_half_life_nothing_is_smoothed() -> None:
    assert smooth(Smoothed(value=90.0, at=0.0), 10.0, 0.0, 0.0).value == 10.0
