# ruff: noqa: DTZ001 - local times have no offset
"""Moments as users write them."""

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.errors import UserError
from gpuyard.model.selection import last_moment, next_moment, parse_moment
from gpuyard.model.units import (
    format_bytes,
    format_count,
    format_due,
    format_duration,
    format_gigabytes,
    format_size,
    parse_duration,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "megabytes"),
    [
        ("8G", 8192), ("8g", 8192), ("8GB", 8192), ("8GiB", 8192), ("8000MB", 8000), ("8000", 8000),
        ("1.5G", 1536), (" 512 M ", 512), ("2T", 2097152), ("1048576B", 1), ("1024K", 1),
    ],
)  # fmt: skip
def test_sizes_are_read_as_people_write_them(text: str, megabytes: float) -> None:
    assert parse_size(text) == megabytes


@pytest.mark.parametrize("text", ["", "G", "8Q", "-8G", "8 G B", "eight", "8GG"])
def test_an_invalid_size_is_rejected_with_an_example(text: str) -> None:
    with pytest.raises(UserError) as refusal:
        parse_size(text)
    assert refusal.value.hint is not None
    assert "8G" in refusal.value.hint


@given(st.integers(0, 10**6))
def test_a_printed_size_reads_back_as_nearly_the_same(megabytes: int) -> None:
    assert parse_size(format_size(megabytes)) == pytest.approx(megabytes, abs=52)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30), ("30s", 30), ("200ms", 0.2), ("10m", 600), ("4h", 14400), ("2d", 172800), ("1.5 H", 5400),
        ("5min", 300), ("4 hours", 14400), ("1 day 2 hrs 5 minutes 30 sec", 93930), (".5", 0.5),
        ("2h30m", 9000), ("1d12h", 129600), ("1h 30m", 5400), ("1m30.5s", 90.5), ("02:00:00", 7200),
        ("36:30:15", 131415), ("1-12:00:00", 129600),
    ],
)  # fmt: skip
def test_times_are_read_as_people_write_them(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "soon", "-1", "inf", "nan", "1e9", "4 weeks", "9" * 40, "2:30", "2h3h", "30m2h", "h", "00:60:00"]
)
def test_an_invalid_duration_is_rejected_with_an_example(text: str) -> None:
    with pytest.raises(UserError) as refusal:
        parse_duration(text)
    assert "4h" in str(refusal.value.hint)


@pytest.mark.parametrize(
    ("megabytes", "text"),
    [(None, "-"), (0, "0 MB"), (1.5, "1.5 MB"), (9.96, "10 MB"), (512, "512 MB"), (1024, "1 GB"), (14131, "13.8 GB")],
)
def test_sizes_as_text(megabytes: float | None, text: str) -> None:
    assert format_size(megabytes) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "-"), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KB"), (5 << 20, "5 MB"), (3 << 30, "3 GB")],
)
def test_bytes_as_text(count: int | None, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (-3, "0s"), (45.9, "45s"), (200, "3m 20s"), (180, "3m"), (14_700, "4h 5m"), (183_600, "2d 3h")],
)
def test_durations_as_text(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text


def test_counts_and_pairs_as_text() -> None:
    assert [format_count(number, "job") for number in (0, 1, 1200)] == ["0 jobs", "1 job", "1,200 jobs"]
    assert [format_gigabytes(number) for number in (None, 0, 8090)] == ["-", "0", "7.9"]


@pytest.mark.parametrize(
    ("left_s", "text"),
    [
        (200.0, "in about 3m 20s"), (1.0, "in about 1s"), (0.4, "at any moment"), (-0.9, "at any moment"),
        (-1.0, "overdue by 1s"), (-185.0, "overdue by 3m 5s"),
    ],
)  # fmt: skip
def test_an_estimate_that_has_passed_is_overdue(left_s: float, text: str) -> None:
    assert format_due(left_s) == text


# ruff: noqa: DTZ001 - local times have no offset


NOW = datetime(2026, 11, 18, 7, 30)


@pytest.mark.parametrize(
    ("text", "last", "next_"),
    [
        ("22:00", datetime(2026, 11, 17, 22), datetime(2026, 11, 18, 22)),
        ("07:00", datetime(2026, 11, 18, 7), datetime(2026, 11, 19, 7)),
        ("07:30:00", datetime(2026, 11, 18, 7, 30), datetime(2026, 11, 19, 7, 30)),
        ("2h30m", datetime(2026, 11, 18, 5), datetime(2026, 11, 18, 10)),
        ("+90s", datetime(2026, 11, 18, 7, 28, 30), datetime(2026, 11, 18, 7, 31, 30)),
        ("2026-11-01", datetime(2026, 11, 1), datetime(2026, 11, 1)),
        ("2026-12-24T18:00", datetime(2026, 12, 24, 18), datetime(2026, 12, 24, 18)),
    ],
)
def test_a_time_of_day_is_the_last_or_the_next_one(text: str, last: datetime, next_: datetime) -> None:
    assert last_moment(parse_moment(text), NOW) == last
    assert next_moment(parse_moment(text), NOW) == next_


def test_an_offset_is_kept() -> None:
    there = timezone(timedelta(hours=9))
    assert parse_moment("2026-11-18T22:00:00+09:00") == datetime(2026, 11, 18, 22, tzinfo=there)


@pytest.mark.parametrize("text", ["", "noon", "24:00", "7:5", "2026-02-30", "2026-11-18T", "99999d", "-1h"])
def test_other_texts_are_rejected_with_examples(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_moment(text)
    assert "22:00" in str(caught.value.hint)
