"""The progress of an attempt: its speed, its figures, and their curves."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.model.job_progress import (
    MOST_FIGURES,
    MOST_MARKS,
    MOST_POINTS,
    Figure,
    JobProgress,
    ProgressReading,
    WorkDone,
    add_reading,
    time_left,
)
from gpuyard.output.progress_line import read_progress_line
from tests.known import known


def amount(done: float, total: float | None = 100, left_s: float | None = None) -> ProgressReading:
    return ProgressReading(amount=WorkDone(done=done, total=total, unit="step", left_s=left_s))


def after(*readings: tuple[float, ProgressReading]) -> JobProgress:
    progress = JobProgress()
    for at_s, reading in readings:
        progress = add_reading(progress, reading, at_s)
    return progress


def test_the_time_left_follows_the_speed() -> None:
    progress = after((100, amount(10)), (110, amount(15)), (120, amount(20)))
    left = known(time_left(progress, 120))
    assert left.likely_s == pytest.approx(160)
    assert left.least_s < 160 < left.most_s
    progress = after((100, amount(10)), (120, amount(20)))
    left = known(time_left(progress, 150))
    assert left.likely_s == pytest.approx(130), "the time left shrinks between two readings"
    slow_start = after((0, amount(0)), (300, amount(1)), (310, amount(11)), (600, amount(50)))
    left = known(time_left(slow_start, 600))
    assert left.likely_s == pytest.approx(50 * 300 / 49, rel=0.1), "the start does not count as slow progress"
    left = known(time_left(after((20, amount(10, left_s=77))), 20))
    assert left.likely_s == 77, "what the program says counts until its speed is known"
    progress = after((0, amount(10)), (100, amount(100)), (101, amount(0)), (111, amount(1)), (121, amount(2)))
    left = known(time_left(progress, 121))
    assert left.likely_s == pytest.approx(980), "other work that begins at zero has a speed of its own"
    progress = after((0, amount(10)), (50, amount(60)), (51, amount(58)), (100, amount(90)))
    assert time_left(progress, 100) is not None, "a bar inside that is over does not make the speed unknown"


@pytest.mark.parametrize(
    "progress",
    [
        JobProgress(), after((5, amount(50))), after((5, amount(10)), (9, amount(20))),
        after((5, amount(10, None)), (900, amount(20, None))), after((5, amount(10)), (900, amount(10))),
        after((5, amount(0)), (900, amount(0.5))),
    ],
)  # fmt: skip
def test_progress_that_says_too_little_gives_no_end(progress: JobProgress) -> None:
    assert time_left(progress, 900) is None


def test_figures_keep_their_last_value_and_their_range() -> None:
    progress = after((1, ProgressReading(figures=[(("loss", 0.5),), (("loss", 0.1),), (("loss", 0.3),)])))
    assert progress.figures == {"loss": Figure(last=0.3, least=0.1, most=0.5)}
    # A figure that is no number shows as unknown and keeps its range.
    progress = after((1, ProgressReading(figures=[(("loss", 0.5),), (("loss", None),)])))
    assert progress.figures == {"loss": Figure(last=None, least=0.5, most=0.5)}
    assert progress.curves.values == {"loss": (0.5, None)}
    told = ProgressReading(amount=WorkDone(done=1, total=10, unit=""), is_told=True)
    mixed = after((1, told), (2, amount(99)))
    assert (mixed.amount, mixed.is_told) == (told.amount, True), "what a program tells outweighs its output"
    lines = ProgressReading(amount=WorkDone(done=1, total=2, unit=""), figures=[(("loss", value),) for value in (3, 2)])
    only = after((10, ProgressReading(figures=[(("loss", 1.0),)])), (20, ProgressReading(figures=lines.figures)))
    assert only.curves.times_s == (10, 15, 20), "lines between two looks are spread over the time"


values = st.one_of(st.none(), st.floats())
lines = st.lists(st.tuples(st.sampled_from("abcdefghijkl"), values), max_size=12).map(tuple)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.lists(lines, max_size=5)), max_size=200))
def test_everything_is_bounded_and_can_be_stored(
    readings: list[tuple[float, list[tuple[tuple[str, float], ...]]]],
) -> None:
    progress, at_s = JobProgress(), 0.0
    for seconds, figures in readings:
        at_s += seconds
        reading = ProgressReading(amount=WorkDone(done=min(100.0, seconds), total=100, unit=""), figures=figures)
        progress = add_reading(progress, reading, at_s)
    assert len(progress.figures) <= MOST_FIGURES
    assert len(progress.marks) <= MOST_MARKS
    assert len(progress.curves.times_s) <= MOST_POINTS
    assert all(len(column) == len(progress.curves.times_s) for column in progress.curves.values.values())
    assert all(each.last is None or math.isfinite(each.last) for each in progress.figures.values())
    stored = msgspec.json.decode(msgspec.json.encode(progress), type=JobProgress)
    assert stored.figures == progress.figures


@pytest.mark.parametrize(
    ("text", "done", "total", "unit"),
    [
        ("3/10\n", 3, 10, ""), ("3.5/10 unit=epoch\n", 3.5, 10, "epoch"), ("40%", 40, 100, "%"),
        ("120", 120, None, ""), ("12/10", 10, 10, ""),
    ],
)  # fmt: skip
def test_the_file_says_how_much_is_done(text: str, done: float, total: float | None, unit: str) -> None:
    assert known(read_progress_line(text)).amount == WorkDone(done=done, total=total, unit=unit)


@pytest.mark.parametrize("text", ["", "\n", "half", "3/0", "-1/5", "nan/5", "1e9/5", "9" * 30, "{}", "3/10/12"])
def test_a_file_that_begins_otherwise_says_nothing(text: str) -> None:
    assert read_progress_line(text) is None


def test_the_file_has_figures_and_the_time_left() -> None:
    reading = known(read_progress_line("3/10 loss=0.5 bad acc=nan left=90 =3 x= \x1b[31m=4\nnot read loss=9"))
    assert reading.amount is not None
    assert reading.amount.left_s == 90
    assert reading.figures == ((("loss", 0.5), ("acc", None), ("\\x1b[31m", 4.0)),)
