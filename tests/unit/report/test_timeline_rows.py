"""Rows of a timeline, and when a run was suspended."""

from hypothesis import given
from hypothesis import strategies as st

from gpuyard.report.chart_rows import TimelineSpan, assign_rows, count_rows, suspensions

INF = float("inf")


def span(start: float, end: float | None, lane: int = 0) -> TimelineSpan:
    return TimelineSpan(lane=lane, start=start, end=end)


spans = st.lists(
    st.builds(
        lambda lane, start, length: span(start, None if length is None else start + length, lane),
        st.integers(0, 2),
        st.integers(0, 30),
        st.none() | st.integers(0, 12),
    ),
    max_size=40,
)


def end(each: TimelineSpan) -> float:
    return INF if each.end is None else each.end


def overlap(one: TimelineSpan, other: TimelineSpan) -> bool:
    return one.lane == other.lane and one.start < end(other) and other.start < end(one)


@given(spans)
def test_overlapping_spans_have_rows_of_their_own_and_no_more(found: list[TimelineSpan]) -> None:
    # Overlapping spans of a lane never share a row.
    rows = assign_rows(found)
    for place, one in enumerate(found):
        for other in range(place):
            assert rows[place] != rows[other] or not overlap(one, found[other])
    # A lane has as many rows as spans overlap at most.
    counted = count_rows(found, assign_rows(found))
    for lane in range(3):
        here = [each for each in found if each.lane == lane]
        at_once = [sum(each.start <= one.start < end(each) for each in here) for one in here]
        # A span of zero length overlaps only with spans around it.
        moments = [
            1 + sum(each.start < one.start < end(each) for each in here) for one in here if one.start == end(one)
        ]
        assert counted.get(lane, 0) == max([*at_once, *moments], default=0)


def test_rows_and_suspensions() -> None:
    assert assign_rows([span(5, 9), span(0, 5), span(2, 7), span(7, None)]) == [0, 0, 1, 1]
    assert assign_rows([span(5, 3), span(4, 6)]) == [1, 0], "a span that ends before it begins has a row"
    # A run counts as suspended from the request until it resumed.
    events = [(10.0, "suspending"), (12.0, "suspended"), (20.0, "resumed"), (30.0, "suspending"), (31.0, "suspended")]
    assert suspensions(events, 5.0, None) == [(10.0, 20.0), (30.0, None)]
    assert suspensions(events, 5.0, 40.0) == [(10.0, 20.0), (30.0, 40.0)]
    events = [(10.0, "suspending"), (20.0, "resumed"), (50.0, "suspending"), (60.0, "resumed")]
    assert suspensions(events, 5.0, 25.0) == [(10.0, 20.0)]
    assert suspensions(events, 40.0, None) == [(50.0, 60.0)], "suspensions of another run of the job do not count"
