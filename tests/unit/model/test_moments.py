# ruff: noqa: DTZ001 - local times have no offset
"""Moments as users write them."""

from datetime import datetime, timedelta, timezone

import pytest

from gpuyard.errors import UserError
from gpuyard.model.selection import last_moment, next_moment, parse_moment

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
