"""The card's idle time, and its causes, as the residency benchmark's timeline counts them."""

import pytest

from bench.intervals import Span, ThreadStates, by_size, gaps, total, union


def test_the_union_covers_overlapping_intervals_once() -> None:
    assert union([(3, 4), (0, 2), (1, 2.5), (2.5, 2.75)]) == [(0, 2.75), (3, 4)]


def test_the_gaps_are_what_the_union_leaves_of_the_window() -> None:
    assert gaps([(1, 2), (3, 4)], (0, 5)) == [(0, 1), (2, 3), (4, 5)]
    assert gaps([(-1, 2), (3, 9)], (0, 5)) == [(2, 3)]
    assert gaps([], (0, 5)) == [(0, 5)]


def test_gaps_are_counted_by_their_length() -> None:
    assert by_size([(0, 1e-5), (1, 1.001), (2, 2.001), (3, 4)]) == {
        "under 20 us": 0.0,
        "under 2 ms": pytest.approx(0.002),
        "longer": 1.0,
    }


def test_the_innermost_span_is_the_state_of_a_thread() -> None:
    states = ThreadStates([Span("w", "read back", 2, 3), Span("w", "render", 1, 4), Span("w", "wait", 4, 6)])

    assert [states.at("w", when) for when in (0.5, 1.5, 2.5, 3.5, 5, 7)] == [
        "idle", "render", "read back", "render", "wait", "idle",
    ]  # fmt: skip
    assert states.seconds("w", (0, 8)) == {"idle": 3.0, "render": 2.0, "read back": 1.0, "wait": 2.0}


def test_idle_time_is_charged_to_what_the_workers_did() -> None:
    spans = [Span("w0", "render", 0, 10), Span("w1", "wait for disk", 0, 5), Span("w1", "render", 5, 10)]
    idle = [(1.0, 4.0), (6.0, 7.0), (8.0, 9.0)]

    causes = ThreadStates(spans).causes(idle, ["w0", "w1"])

    assert causes == [("1 render, 1 wait for disk", 3.0), ("2 render", 2.0)]
    assert total(idle) == 5.0
