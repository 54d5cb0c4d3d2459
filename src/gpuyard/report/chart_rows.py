"""Rows of charts: use by the hour, as one row per day (or per whole weeks, if those are too many), in local time, which
the caller supplies; and the runs of a timeline, each in the first row that is free when it starts."""

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import date, datetime

from msgspec import Struct

HOUR_S = 3600.0
MAX_ROWS = 31

LocalTime = Callable[[float], datetime]


class TimeWindow(Struct, frozen=True):
    """A time interval in seconds since the epoch."""

    since: float
    until: float

    @property
    def hours(self) -> float:
        return (self.until - self.since) / HOUR_S


class DayRow(Struct, frozen=True, kw_only=True):
    """The row that starts with `day`: GPU-hours for each hour of the day, and the percentage of devices in use (None
    outside the window and without devices)."""

    day: str
    gpu_hours: tuple[float, ...]
    used_percent: tuple[float | None, ...]


class HourlyPicture(Struct, frozen=True, kw_only=True):
    days_per_row: int
    rows: tuple[DayRow, ...]


class Hours:
    """Seconds of use in each hour that the window touches. Adding an interval takes constant time."""

    def __init__(self, window: TimeWindow, local: LocalTime) -> None:
        moment = local(window.since)
        self.first = window.since - moment.minute * 60 - moment.second - moment.microsecond / 1e6
        self.count = max(1, -int(-(window.until - self.first) // HOUR_S))
        self._parts = [0.0] * (self.count + 1)
        self._steps = [0] * (self.count + 2)  # change of the number of whole hours, compared with the hour before

    def add(self, start: float, end: float, weight: int = 1) -> None:
        """Add an interval, which has to lie inside the window."""
        at, last = int((start - self.first) // HOUR_S), int((end - self.first) // HOUR_S)
        if at == last:
            self._parts[at] += (end - start) * weight
            return
        self._parts[at] += (self.first + (at + 1) * HOUR_S - start) * weight
        self._parts[last] += (end - self.first - last * HOUR_S) * weight
        self._steps[at + 1] += weight
        self._steps[last] -= weight

    def seconds(self) -> list[float]:
        whole = itertools.accumulate(self._steps[: self.count])
        return [part + hours * HOUR_S for part, hours in zip(self._parts, whole, strict=False)]


def hourly_picture(window: TimeWindow, local: LocalTime, used: Hours, busy: Hours, devices: int) -> HourlyPicture:
    """Arrange hours as rows. `used` sums the time of all attempts; `busy` counts each of `devices` devices once."""
    moments = [local(used.first + at * HOUR_S) for at in range(used.count)]
    first_day, last_day = moments[0].toordinal(), moments[-1].toordinal()
    count, days = last_day - first_day + 1, 1
    while -(-count // days) > MAX_ROWS:
        days = 7 if days == 1 else 2 * days
    # For each hour of each row, sums of: use, time in use, time of all devices. An hour that occurs twice on one day
    # (end of summer time) is one cell of double length.
    sums = [[(0.0, 0.0, 0.0)] * 24 for _ in range((last_day - first_day) // days + 1)]
    for at, (moment, used_s, busy_s) in enumerate(zip(moments, used.seconds(), busy.seconds(), strict=True)):
        start = used.first + at * HOUR_S
        in_window_s = max(0.0, min(start + HOUR_S, window.until) - max(start, window.since))
        row = sums[(moment.toordinal() - first_day) // days]
        before = row[moment.hour]
        row[moment.hour] = (before[0] + used_s, before[1] + busy_s, before[2] + in_window_s * devices)
    rows = [
        DayRow(
            day=date.fromordinal(first_day + number * days).isoformat(),
            gpu_hours=tuple(used_s / HOUR_S for used_s, _, _ in row),
            used_percent=tuple(min(100.0, 100 * busy_s / all_s) if all_s > 0 else None for _, busy_s, all_s in row),
        )
        for number, row in enumerate(sums)
    ]
    return HourlyPicture(days_per_row=days, rows=tuple(rows))


def merge_intervals(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


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
    counted: defaultdict[int, int] = defaultdict(int)
    for span, row in zip(spans, rows, strict=True):
        counted[span.lane] = max(counted[span.lane], row + 1)
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
