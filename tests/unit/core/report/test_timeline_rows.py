"""Rows of a timeline, and when a run was suspended."""

from hypothesis import given
from hypothesis import strategies as st

from gpuyard.core.report.timeline_rows import TimelineSpan, assign_rows, count_rows, suspensions

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
def test_no_two_that_overlap_share_a_row_of_their_lane(found: list[TimelineSpan]) -> None:
    rows = assign_rows(found)
    for place, one in enumerate(found):
        for other in range(place):
            assert rows[place] != rows[other] or not overlap(one, found[other])


@given(spans)
def test_a_lane_has_as_few_rows_as_the_most_that_overlap(found: list[TimelineSpan]) -> None:
    counted = count_rows(found, assign_rows(found))
    for lane in range(3):
        here = [each for each in found if each.lane == lane]
        at_once = [sum(each.start <= one.start < end(each) for each in here) for one in here]
        # One that began and ended in the same moment overlaps only with those around it.
        moments = [
            1 + sum(each.start < one.start < end(each) for each in here) for one in here if one.start == end(one)
        ]
        assert counted.get(lane, 0) == max([*at_once, *moments], default=0)


def test_one_that_begins_when_another_ends_takes_its_row() -> None:
    assert assign_rows([span(5, 9), span(0, 5), span(2, 7), span(7, None)]) == [0, 0, 1, 1]


def test_one_that_ended_before_it_began_by_a_clock_that_was_set_back_has_a_row() -> None:
    assert assign_rows([span(5, 3), span(4, 6)]) == [1, 0]


def test_a_run_was_suspended_from_when_it_was_told_to_until_it_went_on() -> None:
    events = [(10.0, "suspending"), (12.0, "suspended"), (20.0, "resumed"), (30.0, "suspending"), (31.0, "suspended")]
    assert suspensions(events, 5.0, None) == [(10.0, 20.0), (30.0, None)]
    assert suspensions(events, 5.0, 40.0) == [(10.0, 20.0), (30.0, 40.0)]


def test_what_happened_to_another_run_of_the_job_is_not_this_ones() -> None:
    events = [(10.0, "suspending"), (20.0, "resumed"), (50.0, "suspending"), (60.0, "resumed")]
    assert suspensions(events, 5.0, 25.0) == [(10.0, 20.0)]
    assert suspensions(events, 40.0, None) == [(50.0, 60.0)]
