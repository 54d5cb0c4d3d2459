from datetime import datetime

import pytest

from gpuyard.core.job.moments import last_moment, parse_moment
from gpuyard.errors import UserError

NOW = datetime.fromisoformat("2026-11-18 09:30")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("22:00", "2026-11-17 22:00"),
        ("9:30", "2026-11-18 09:30"),
        ("09:30:01", "2026-11-17 09:30:01"),
        ("2026-11-16", "2026-11-16 00:00"),
        ("2026-11-16T22:00", "2026-11-16 22:00"),
        ("2026-11-16 22:00", "2026-11-16 22:00"),
        ("8h", "2026-11-18 01:30"),
        (" 2d ", "2026-11-16 09:30"),
    ],
)
def test_a_time_of_day_is_the_last_one_and_a_duration_is_ago(text: str, found: str) -> None:
    assert last_moment(parse_moment(text), NOW) == datetime.fromisoformat(found)


@pytest.mark.parametrize("text", ["", "now", "24:00", "22:60", "2026-13-01", "2026-11-18T99", "-3h", "4000d"])
def test_anything_else_is_an_error_with_examples(text: str) -> None:
    with pytest.raises(UserError) as raised:
        parse_moment(text)
    assert raised.value.hint is not None
    assert "22:00" in raised.value.hint
