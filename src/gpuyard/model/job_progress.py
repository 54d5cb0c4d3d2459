"""The progress of an attempt as it is kept, all of it bounded: 32 marks, 8 figures, curves of 120 points."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

T = TypeVar("T")

MOST_MARKS = 32
MOST_FIGURES = 8
MOST_POINTS = 120
# Progress that was watched for less time says nothing about the end.
_LEAST_WATCHED_S = 10.0

NamedValues = Sequence[tuple[str, float | None]]


class WorkDone(Struct, frozen=True, kw_only=True):
    """How much of what is done. `left_s` is the time left that the program itself tells; None: it tells none."""

    done: float
    total: float | None
    unit: str
    left_s: float | None = None


class Figure(Struct, frozen=True, kw_only=True):
    """The last, the least and the largest value of a name. `last` is None if it was no finite number."""

    last: float | None
    least: float | None = None
    most: float | None = None


class FigureCurves(Struct, frozen=True, kw_only=True):
    """Values of figures over the run time of the attempt; None where a figure had none."""

    times_s: tuple[float, ...] = ()
    values: dict[str, tuple[float | None, ...]] = {}


class ProgressReading(Struct, frozen=True, kw_only=True):
    """The amount, if there was a new one, and the named values that one look has shown. `is_told`: by the file."""

    amount: WorkDone | None = None
    figures: Sequence[NamedValues] = ()
    is_told: bool = False


class JobProgress(Struct, frozen=True, kw_only=True):
    """`amount` as of `at_s`, in seconds of run time. `marks` are run times and fractions since it last began anew.
    `is_told`: the program wrote it into its file, so its output does not count."""

    amount: WorkDone | None = None
    at_s: float = 0.0
    marks: tuple[tuple[float, float], ...] = ()
    is_told: bool = False
    figures: dict[str, Figure] = {}
    curves: FigureCurves = FigureCurves()

    @property
    def fraction(self) -> float | None:
        """The part of the work that is done, from 0 to 1; None if the total is unknown."""
        amount = self.amount
        return None if amount is None or not amount.total else min(1.0, max(0.0, amount.done / amount.total))


class RemainingTime(Struct, frozen=True, kw_only=True):
    """The time that an attempt still needs: at least, likely and at most."""

    least_s: float
    likely_s: float
    most_s: float


def add_reading(progress: JobProgress, reading: ProgressReading, at_s: float) -> JobProgress:
    """Return the progress with a reading taken `at_s` seconds of run time after the start."""
    before_s = progress.at_s
    if reading.amount is not None and (reading.is_told or not progress.is_told):
        amount = replace(reading.amount, done=float(f"{reading.amount.done:.7g}"))
        progress = replace(progress, amount=amount, at_s=round(at_s, 2), is_told=reading.is_told)
        progress = replace(progress, marks=_with_mark(progress.marks, at_s, progress.fraction))
    count = len(reading.figures)
    if not count:
        return progress
    # Lines that were printed between two looks are spread over the time between them.
    times = [before_s + (at_s - before_s) * (number + 1) / count for number in range(count)]
    figures = _with_figures(progress.figures, reading.figures)
    points = ((at, dict(values)) for at, values in zip(times, reading.figures, strict=True))
    return replace(
        progress, at_s=round(at_s, 2), figures=figures, curves=_with_points(progress.curves, points, figures)
    )


def time_left(progress: JobProgress, ran_s: float) -> RemainingTime | None:
    """Return how long an attempt that has run for `ran_s` still needs, if its own progress says enough."""
    fraction, amount = progress.fraction, progress.amount
    if fraction is None or amount is None or fraction < 0.01:
        return None
    left_s, marks = None, progress.marks
    if marks and marks[-1][0] - marks[0][0] >= _LEAST_WATCHED_S:
        # The speed is that of the later half of the time, of 10 s at least.
        (last_s, last), first_s = marks[-1], marks[0][0]
        recent_s = max(_LEAST_WATCHED_S, 0.5 * (last_s - first_s))
        since_s, since = next(mark for mark in reversed(marks) if mark[0] <= last_s - recent_s)
        left_s = None if last <= since else (1 - last) * (last_s - since_s) / (last - since)
    if left_s is None and amount.left_s is not None and progress.at_s >= _LEAST_WATCHED_S:
        left_s = amount.left_s
    if left_s is None:
        return None
    left_s = max(0.0, left_s - max(0.0, ran_s - progress.at_s))
    # How far the end may be from the likely one: half of the time left at the beginning, a tenth towards the end.
    spread = 0.5 + (0.1 - 0.5) * fraction
    return RemainingTime(least_s=left_s * (1 - spread), likely_s=left_s, most_s=left_s * (1 + spread) + 10.0)


def _significant(value: float | None) -> float | None:
    """Return a value with 7 digits that count, which make curves shorter; None for one that is not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.7g}")


def _with_mark(
    marks: tuple[tuple[float, float], ...], at_s: float, fraction: float | None
) -> tuple[tuple[float, float], ...]:
    """Add a mark; begin anew where the fraction has fallen far. Of more than 32 marks every second one stays."""
    if fraction is None:
        return ()
    if marks and fraction < marks[-1][1] - 0.05:
        marks = ()
    if marks and fraction < marks[-1][1]:  # a bar inside was over, and the next one is not drawn yet
        return marks
    marks = (*marks, (round(at_s, 2), round(fraction, 7)))
    return marks if len(marks) <= MOST_MARKS else (*marks[:-1:2], marks[-1])


def _with_figures(before: Mapping[str, Figure], lines: Iterable[NamedValues]) -> dict[str, Figure]:
    kept = dict(before)
    for name, value in (pair for line in lines for pair in line):
        if name not in kept and len(kept) >= MOST_FIGURES:
            continue
        last, figure = _significant(value), kept.get(name)
        known = [each for each in (last, *((figure.least, figure.most) if figure else ())) if each is not None]
        kept[name] = Figure(last=last, least=min(known, default=None), most=max(known, default=None))
    return kept


def _with_points(
    curves: FigureCurves, points: Iterable[tuple[float, Mapping[str, float | None]]], figures: Mapping[str, Figure]
) -> FigureCurves:
    """Add points. Beyond 120 every second one goes, so that the distances stay alike."""
    times = list(curves.times_s)
    values = {name: list(curves.values.get(name, (None,) * len(times))) for name in figures}
    for at_s, given in points:
        times.append(round(at_s, 2))
        for name, column in values.items():
            column.append(_significant(given.get(name)))
        if len(times) > MOST_POINTS:
            times = _thinned(times)
            values = {name: _thinned(column) for name, column in values.items()}
    return FigureCurves(times_s=tuple(times), values={name: tuple(column) for name, column in values.items()})


def _thinned(column: list[T]) -> list[T]:
    """Return every second entry, and the last one."""
    return [*column[:-1:2], column[-1]]
