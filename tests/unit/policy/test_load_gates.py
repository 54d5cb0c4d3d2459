"""Gates with hysteresis: a figure that hovers around its limit does not make them flutter."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.policy.foreign_load import Smoothed, SteadyGate, is_above, is_below, judge_steadily, smooth
from gpuyard.policy.numbers import FORGET_AFTER_HALF_LIVES

HALF_LIFE = 5.0
readings = st.floats(0, 100)


def test_averages_follow_half_lives() -> None:
    assert smooth(Smoothed(), 80.0, 10.0, HALF_LIFE) == Smoothed(value=80.0, at=10.0), "the first reading counts whole"
    # After one half life the old and the new count alike.
    before = Smoothed(value=0.0, at=0.0)
    assert smooth(before, 100.0, HALF_LIFE, HALF_LIFE).value == pytest.approx(50.0)
    before = Smoothed(value=90.0, at=0.0)
    assert smooth(before, None, 1.0, HALF_LIFE).value == 90.0, "unknown is no zero and is remembered only for a while"
    assert smooth(before, None, FORGET_AFTER_HALF_LIVES * HALF_LIFE + 0.1, HALF_LIFE).value is None
    assert smooth(Smoothed(), None, 1.0, HALF_LIFE) == Smoothed()
    assert smooth(Smoothed(value=90.0, at=0.0), 10.0, 0.0, 0.0).value == 10.0, "without a half life nothing is smoothed"


@given(start=readings, level=readings, cuts=st.lists(st.floats(0.01, 5), min_size=1, max_size=8))
def test_an_average_does_not_depend_on_the_rate_of_samples(start: float, level: float, cuts: list[float]) -> None:
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


OPEN, CLOSED = False, True
percents = st.floats(0, 200)


@pytest.mark.parametrize(
    ("figure", "when_open", "when_closed"),
    [(80.0, OPEN, OPEN), (85.0, OPEN, OPEN), (85.1, OPEN, CLOSED), (90.0, OPEN, CLOSED), (90.1, CLOSED, CLOSED)],
)
def test_a_gate_reopens_well_below_its_upper_limit(figure: float, when_open: bool, when_closed: bool) -> None:
    assert is_above(figure, 90.0, 5.0, was_above=OPEN) == when_open
    assert is_above(figure, 90.0, 5.0, was_above=CLOSED) == when_closed


@pytest.mark.parametrize(
    ("figure", "when_open", "when_closed"),
    [(700.0, OPEN, OPEN), (640.0, OPEN, OPEN), (639.0, OPEN, CLOSED), (512.0, OPEN, CLOSED), (511.0, CLOSED, CLOSED)],
)
def test_a_gate_reopens_well_above_its_lower_limit(figure: float, when_open: bool, when_closed: bool) -> None:
    assert is_below(figure, 512.0, 128.0, was_below=OPEN) == when_open
    assert is_below(figure, 512.0, 128.0, was_below=CLOSED) == when_closed


@pytest.mark.parametrize("gate", [OPEN, CLOSED])
def test_the_unknown_closes_nothing_and_neither_does_a_missing_bound(gate: bool) -> None:
    assert is_above(None, 90.0, 5.0, was_above=gate) == OPEN
    assert is_above(1000.0, None, 5.0, was_above=gate) == OPEN
    assert is_below(None, 90.0, 5.0, was_below=gate) == OPEN
    assert is_below(1000.0, None, 5.0, was_below=gate) == OPEN


@given(st.lists(st.floats(85.001, 90), min_size=1, max_size=30), st.sampled_from([OPEN, CLOSED]))
def test_between_the_two_bounds_a_gate_stays_as_it_was(readings: list[float], before: bool) -> None:
    gate = before
    for reading in readings:
        gate = is_above(reading, 90.0, 5.0, was_above=gate)
        assert gate == before


@given(st.lists(percents, max_size=40))
def test_between_two_closings_the_figure_was_well_within(readings: list[float]) -> None:
    gate, lowest = OPEN, 0.0
    for reading in readings:
        lowest = min(lowest, reading)
        after = is_above(reading, 90.0, 5.0, was_above=gate)
        if after and not gate:
            assert lowest <= 85.0
            lowest = reading
        gate = after


OPENED, SHUT = SteadyGate(), SteadyGate(is_closed=True)
STEADY_S = 3.0
verdicts = st.sampled_from([True, False, None])
steps = st.lists(st.tuples(st.floats(0.0, 4.0), verdicts), max_size=40)


def gates_after(story: Sequence[tuple[float, bool | None]]) -> list[tuple[float, SteadyGate]]:
    """Return the gate after each reading, given as (seconds since the previous one, is within)."""
    gate, now, found = OPENED, 0.0, []
    for later_s, is_within in story:
        now += later_s
        gate = judge_steadily(gate, is_within, now, STEADY_S)
        found.append((now, gate))
    return found


def test_it_closes_at_once_and_opens_after_a_steady_time() -> None:
    assert judge_steadily(OPENED, False, 10.0, STEADY_S) == SHUT, "it closes at the first reading over the limit"
    # It opens when the figure has been within for long enough and not before.
    story = [(0.0, False), (1.0, True), (2.9, True), (0.1, True)]
    assert [gate.is_closed for _, gate in gates_after(story)] == [True, True, True, False]
    # A reading over the limit restarts the wait.
    story = [(0.0, False), (1.0, True), (2.0, False), (1.0, True), (2.9, True), (0.1, True)]
    assert [gate.is_closed for _, gate in gates_after(story)] == [True, True, True, True, True, False]
    assert judge_steadily(SHUT, True, 10.0, 0.0) == OPENED, "without a time to be steady it follows its figure"
    waiting = SteadyGate(is_closed=True, within_since=100.0)
    set_back = judge_steadily(waiting, True, 50.0, STEADY_S)
    assert set_back.is_closed
    assert judge_steadily(set_back, True, 52.9, STEADY_S).is_closed, "a clock that was set back does not open it early"
    assert not judge_steadily(set_back, True, 53.0, STEADY_S).is_closed


@pytest.mark.parametrize("gate", [OPENED, SHUT, SteadyGate(is_closed=True, within_since=9.0)])
def test_the_unknown_closes_nothing_and_keeps_nothing_closed(gate: SteadyGate) -> None:
    assert judge_steadily(gate, None, 10.0, STEADY_S) == OPENED
