"""Rows of a timeline: attempts that overlap in one lane are drawn below each other, in as few rows as possible.

Each attempt gets the first row that is free when it starts. Attempts are handled in the order of their starts, so a new
row is opened only while all others are in use: the number of rows is the largest number that ever overlaps.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence

from msgspec import Struct


class TimelineSpan(Struct, frozen=True, kw_only=True):
    """When something ran in a lane; without an end it still runs."""

    lane: int
    start: float
    end: float | None = None


def assign_rows(spans: Sequence[TimelineSpan]) -> list[int]:
    """Return the row of each span. A span may start in the moment in which another one of its row ends."""
    rows = [0] * len(spans)
    free: defaultdict[int, list[int]] = defaultdict(list)  # free rows of each lane
    taken: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)  # others, with the time at which they are free
    # A clock that was set back must not make a span end before its start.
    ends = [math.inf if span.end is None else max(span.start, span.end) for span in spans]
    for index in sorted(range(len(spans)), key=lambda each: (spans[each].start, ends[each])):
        span = spans[index]
        lane_free, lane_taken = free[span.lane], taken[span.lane]
        while lane_taken and lane_taken[0][0] <= span.start:
            heapq.heappush(lane_free, heapq.heappop(lane_taken)[1])
        # Without a free row all are taken, and the next one is opened.
        rows[index] = heapq.heappop(lane_free) if lane_free else len(lane_taken)
        heapq.heappush(lane_taken, (ends[index], rows[index]))
    return rows


def count_rows(spans: Sequence[TimelineSpan], rows: Sequence[int]) -> dict[int, int]:
    """Return the number of rows of each lane that has any."""
    counted: dict[int, int] = {}
    for span, row in zip(spans, rows, strict=True):
        counted[span.lane] = max(counted.get(span.lane, 0), row + 1)
    return counted


def suspensions(
    events: Sequence[tuple[float, str]], start: float, end: float | None
) -> list[tuple[float, float | None]]:
    """Return when an attempt was suspended, from the history of its job, which covers all attempts."""
    found: list[tuple[float, float | None]] = []
    since: float | None = None
    for at, kind in events:
        if at < start or (end is not None and at > end):
            continue
        if kind == "resumed" and since is not None:
            found.append((since, at))
            since = None
        elif kind == "suspending" and since is None:
            since = at
    return found if since is None else [*found, (since, end)]
