"""Gates with hysteresis: a figure that hovers around its limit does not make them flutter."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.core.scheduling.load_gates import Gate, judge_above, judge_below

OPEN, CLOSED = Gate(), Gate(is_closed=True)
figures = st.floats(0, 200)
Judge = Callable[[Gate, float | None, float | None, float], Gate]


@pytest.mark.parametrize(
    ("figure", "when_open", "when_closed"),
    [(80.0, OPEN, OPEN), (85.0, OPEN, OPEN), (85.1, OPEN, CLOSED), (90.0, OPEN, CLOSED), (90.1, CLOSED, CLOSED)],
)
def test_a_gate_reopens_when_the_figure_is_well_below_its_upper_limit(
    figure: float, when_open: Gate, when_closed: Gate
) -> None:
    assert judge_above(OPEN, figure, 90.0, 5.0) == when_open
    assert judge_above(CLOSED, figure, 90.0, 5.0) == when_closed


@pytest.mark.parametrize(
    ("figure", "when_open", "when_closed"),
    [(700.0, OPEN, OPEN), (640.0, OPEN, OPEN), (639.0, OPEN, CLOSED), (512.0, OPEN, CLOSED), (511.0, CLOSED, CLOSED)],
)
def test_a_gate_reopens_when_the_figure_is_well_above_its_lower_limit(
    figure: float, when_open: Gate, when_closed: Gate
) -> None:
    assert judge_below(OPEN, figure, 512.0, 128.0) == when_open
    assert judge_below(CLOSED, figure, 512.0, 128.0) == when_closed


@pytest.mark.parametrize("judge", [judge_above, judge_below])
@pytest.mark.parametrize("gate", [OPEN, CLOSED])
def test_the_unknown_closes_nothing_and_neither_does_a_missing_bound(judge: Judge, gate: Gate) -> None:
    assert judge(gate, None, 90.0, 5.0) == OPEN
    assert judge(gate, 1000.0, None, 5.0) == OPEN


@given(st.lists(st.floats(85.001, 90), min_size=1, max_size=30), st.sampled_from([OPEN, CLOSED]))
def test_between_the_two_bounds_a_gate_stays_as_it_was(readings: list[float], before: Gate) -> None:
    gate = before
    for reading in readings:
        gate = judge_above(gate, reading, 90.0, 5.0)
        assert gate == before


@given(st.lists(figures, max_size=40))
def test_between_two_closings_the_figure_was_well_within(readings: list[float]) -> None:
    gate, lowest = OPEN, 0.0
    for reading in readings:
        lowest = min(lowest, reading)
        after = judge_above(gate, reading, 90.0, 5.0)
        if after.is_closed and not gate.is_closed:
            assert lowest <= 85.0
            lowest = reading
        gate = after
