"""Gates that reopen only after their figure has been within its limit for a while."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.policy.foreign_load import SteadyGate, judge_steadily

OPEN, CLOSED = SteadyGate(), SteadyGate(is_closed=True)
STEADY_S = 3.0
verdicts = st.sampled_from([True, False, None])
steps = st.lists(st.tuples(st.floats(0.0, 4.0), verdicts), max_size=40)


def gates_after(story: Sequence[tuple[float, bool | None]]) -> list[tuple[float, SteadyGate]]:
    """Return the gate after each reading, given as (seconds since the previous one, is within)."""
    gate, now, found = OPEN, 0.0, []
    for later_s, is_within in story:
        now += later_s
        gate = judge_steadily(gate, is_within, now, STEADY_S)
        found.append((now, gate))
    return found


def test_it_closes_at_the_first_reading_over_the_limit() -> None:
    assert judge_steadily(OPEN, False, 10.0, STEADY_S) == CLOSED


def test_it_opens_when_the_figure_has_been_within_for_long_enough_and_not_before() -> None:
    story = [(0.0, False), (1.0, True), (2.9, True), (0.1, True)]
    assert [gate.is_closed for _, gate in gates_after(story)] == [True, True, True, False]


def test_a_reading_over_the_limit_restarts_the_wait() -> None:
    story = [(0.0, False), (1.0, True), (2.0, False), (1.0, True), (2.9, True), (0.1, True)]
    assert [gate.is_closed for _, gate in gates_after(story)] == [True, True, True, True, True, False]


@pytest.mark.parametrize("gate", [OPEN, CLOSED, SteadyGate(is_closed=True, within_since=9.0)])
def test_the_unknown_closes_nothing_and_keeps_nothing_closed(gate: SteadyGate) -> None:
    assert judge_steadily(gate, None, 10.0, STEADY_S) == OPEN


def test_without_a_time_to_be_steady_it_follows_its_figure() -> None:
    assert judge_steadily(CLOSED, True, 10.0, 0.0) == OPEN


def test_a_clock_that_was_set_back_does_not_open_it_early() -> None:
    waiting = SteadyGate(is_closed=True, within_since=100.0)
    set_back = judge_steadily(waiting, True, 50.0, STEADY_S)
    assert set_back.is_closed
    assert judge_steadily(set_back, True, 52.9, STEADY_S).is_closed
    assert not judge_steadily(set_back, True, 53.0, STEADY_S).is_closed


@given(steps)
def test_it_is_never_open_while_its_figure_is_beyond(story: list[tuple[float, bool | None]]) -> None:
    for (_, is_within), (_, gate) in zip(story, gates_after(story), strict=True):
        assert gate.is_closed or is_within is not False


@given(st.lists(st.tuples(st.floats(0.0, 4.0), st.booleans()), max_size=40))
def test_between_closing_and_opening_the_figure_was_within_for_the_whole_time(story: list[tuple[float, bool]]) -> None:
    beyond_at, was_closed = None, False
    for (_, is_within), (now, gate) in zip(story, gates_after(story), strict=True):
        if was_closed and not gate.is_closed:
            assert beyond_at is not None
            assert now - beyond_at >= STEADY_S - 1e-9
        beyond_at = beyond_at if is_within else now
        was_closed = gate.is_closed


@given(steps, st.sets(st.integers(0, 39)))
def test_to_be_beyond_more_often_never_opens_it_earlier(
    story: list[tuple[float, bool | None]], worse: set[int]
) -> None:
    busier = [
        (later_s, False if place in worse and is_within is not None else is_within)
        for place, (later_s, is_within) in enumerate(story)
    ]
    for (_, calm), (_, busy) in zip(gates_after(story), gates_after(busier), strict=True):
        assert busy.is_closed or not calm.is_closed
