"""Gates with hysteresis: a figure that hovers around its limit does not make them flutter."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.policy.foreign_load import is_above, is_below

OPEN, CLOSED = False, True
figures = st.floats(0, 200)


@pytest.mark.parametrize(
    ("figure", "when_open", "when_closed"),
    [(80.0, OPEN, OPEN), (85.0, OPEN, OPEN), (85.1, OPEN, CLOSED), (90.0, OPEN, CLOSED), (90.1, CLOSED, CLOSED)],
)
def test_a_gate_reopens_when_the_figure_is_well_below_its_upper_limit(
    figure: float, when_open: bool, when_closed: bool
) -> None:
    assert is_above(figure, 90.0, 5.0, was_above=OPEN) == when_open
    assert is_above(figure, 90.0, 5.0, was_above=CLOSED) == when_closed


@pytest.mark.parametrize(
    ("figure", "when_open", "when_closed"),
    [(700.0, OPEN, OPEN), (640.0, OPEN, OPEN), (639.0, OPEN, CLOSED), (512.0, OPEN, CLOSED), (511.0, CLOSED, CLOSED)],
)
def test_a_gate_reopens_when_the_figure_is_well_above_its_lower_limit(
    figure: float, when_open: bool, when_closed: bool
) -> None:
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


@given(st.lists(figures, max_size=40))
def test_between_two_closings_the_figure_was_well_within(readings: list[float]) -> None:
    gate, lowest = OPEN, 0.0
    for reading in readings:
        lowest = min(lowest, reading)
        after = is_above(reading, 90.0, 5.0, was_above=gate)
        if after and not gate:
            assert lowest <= 85.0
            lowest = reading
        gate = after
