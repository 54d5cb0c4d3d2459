"""Time by the hour: how many seconds of each hour of a window were used, and those hours as rows of days.

Hours are whole on the clock on the wall, which the caller brings along. A row is a day; where there would be too many,
each row stands for as many whole weeks as it takes.
"""

from collections.abc import Callable, Sequence
from datetime import date, datetime

from msgspec import Struct

HOUR_S = 3600.0
MOST_ROWS = 31
_HOURS_OF_DAY = 24

Local = Callable[[float], datetime]


class TimeWindow(Struct, frozen=True):
    """From when until when, in seconds since the epoch."""

    since: float
    until: float

    @property
    def hours(self) -> float:
        return (self.until - self.since) / HOUR_S


class DayRow(Struct, frozen=True, kw_only=True):
    """From this day on: for each hour of a day the GPU-hours, and how much of the devices was in use; unknown outside
    of the window and where there is no device."""

    day: str
    gpu_hours: tuple[float, ...]
    used_percent: tuple[float | None, ...]


class HourlyPicture(Struct, frozen=True, kw_only=True):
    days_per_row: int
    rows: tuple[DayRow, ...]


class Hours:
    """The hours that a window touches, and what was added to each. A stretch costs the same however long it is."""

    def __init__(self, window: TimeWindow, local: Local) -> None:
        moment = local(window.since)
        self.first = window.since - moment.minute * 60 - moment.second - moment.microsecond / 1e6
        self.count = max(1, -int(-(window.until - self.first) // HOUR_S))
        self._parts = [0.0] * (self.count + 1)
        self._steps = [0] * (self.count + 2)  # by how much more of a whole hour than in the one before

    def add(self, begin: float, end: float, weight: int = 1) -> None:
        """A stretch inside the window."""
        at, last = int((begin - self.first) // HOUR_S), int((end - self.first) // HOUR_S)
        if at == last:
            self._parts[at] += (end - begin) * weight
            return
        self._parts[at] += (self.first + (at + 1) * HOUR_S - begin) * weight
        self._parts[last] += (end - self.first - last * HOUR_S) * weight
        self._steps[at + 1] += weight
        self._steps[last] -= weight

    def seconds(self) -> list[float]:
        found, whole = [], 0
        for at in range(self.count):
            whole += self._steps[at]
            found.append(self._parts[at] + whole * HOUR_S)
        return found


def draw(window: TimeWindow, local: Local, used: Hours, busy: Hours, devices: int) -> HourlyPicture:
    """`used` is what attempts used, each for itself, `busy` when devices were in use, of so many."""
    cells = [_place(local(used.first + at * HOUR_S)) for at in range(used.count)]
    first_day, last_day = cells[0][0], cells[-1][0]
    days = _days_per_row(last_day - first_day + 1)
    sheets = [_Sheet() for _ in range((last_day - first_day) // days + 1)]
    for at, ((day, hour), used_s, busy_s) in enumerate(zip(cells, used.seconds(), busy.seconds(), strict=True)):
        begin = used.first + at * HOUR_S
        there_s = max(0.0, min(begin + HOUR_S, window.until) - max(begin, window.since))
        sheets[(day - first_day) // days].add(hour, used_s, busy_s, there_s * devices)
    rows = [sheet.row(first_day + number * days) for number, sheet in enumerate(sheets)]
    return HourlyPicture(days_per_row=days, rows=tuple(rows))


def _place(moment: datetime) -> tuple[int, int]:
    return moment.toordinal(), moment.hour


def _days_per_row(days: int) -> int:
    if days <= MOST_ROWS:
        return 1
    weeks = 1
    while -(-days // (7 * weeks)) > MOST_ROWS:
        weeks *= 2
    return 7 * weeks


class _Sheet:
    """A row in the making. An hour that the clock has twice on one day is one cell, and there twice as long."""

    def __init__(self) -> None:
        self._used_s, self._busy_s, self._there_s = ([0.0] * _HOURS_OF_DAY for _ in range(3))

    def add(self, hour: int, used_s: float, busy_s: float, there_s: float) -> None:
        self._used_s[hour] += used_s
        self._busy_s[hour] += busy_s
        self._there_s[hour] += there_s

    def row(self, day: int) -> DayRow:
        return DayRow(
            day=date.fromordinal(day).isoformat(),
            gpu_hours=tuple(used / HOUR_S for used in self._used_s),
            used_percent=tuple(map(_percent, self._busy_s, self._there_s)),
        )


def _percent(busy_s: float, there_s: float) -> float | None:
    return min(100.0, 100 * busy_s / there_s) if there_s > 0 else None


def merged(stretches: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Stretches of time that overlap become one."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(stretches):
        if found and begin <= found[-1][1]:
            if end > found[-1][1]:
                found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found
