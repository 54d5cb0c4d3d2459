"""Rows of a timeline: attempts that overlap in one lane are drawn below each other, in as few rows as possible.

Each attempt gets the first row that is free when it starts. Attempts are handled in the order of their starts, so a new
row is opened only while all others are in use: the number of rows is the largest number that ever overlaps.
"""

import heapq
import math
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
    lanes: dict[int, list[tuple[float, float, int]]] = {}
    for index, span in enumerate(spans):
        # A clock that was set back must not make a span end before its start.
        end = math.inf if span.end is None else max(span.start, span.end)
        lanes.setdefault(span.lane, []).append((span.start, end, index))
    for lane in lanes.values():
        _assign(sorted(lane), rows)
    return rows


def count_rows(spans: Sequence[TimelineSpan], rows: Sequence[int]) -> dict[int, int]:
    """Return the number of rows of each lane that has any."""
    counted: dict[int, int] = {}
    for span, row in zip(spans, rows, strict=True):
        counted[span.lane] = max(counted.get(span.lane, 0), row + 1)
    return counted


def _assign(spans: Sequence[tuple[float, float, int]], rows: list[int]) -> None:
    """Set the rows of the spans of one lane, given as (start, end, index) in the order of their starts."""
    free: list[int] = []
    taken: list[tuple[float, int]] = []
    opened = 0
    for start, end, index in spans:
        while taken and taken[0][0] <= start:
            heapq.heappush(free, heapq.heappop(taken)[1])
        if free:
            row = heapq.heappop(free)
        else:
            row, opened = opened, opened + 1
        rows[index] = row
        heapq.heappush(taken, (end, row))


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
