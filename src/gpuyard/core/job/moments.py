"""Moments as users write them: `22:00`, `2026-11-18`, `2026-11-18T22:00`, or a time from now such as `2h30m`.

A time of day without a date is the last one for what has happened (`since=22:00`), and the next one for what will
happen (`--at 22:00`). All pure: the caller gives the local time of now.
"""

import re
from datetime import datetime, time, timedelta

from gpuyard.core.units import parse_duration
from gpuyard.errors import UserError

# A time of day, a date with or without a time, or a time from now.
Moment = time | datetime | timedelta

_TIME_OF_DAY = re.compile(r"(\d{1,2}):([0-5]\d)(?::([0-5]\d))?", re.ASCII)
_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
LONGEST_S = 3660 * 86400.0
_MOMENT_HINT = "write it as 22:00, 2026-11-18, 2026-11-18T22:00 or 2h30m"


def parse_moment(text: str) -> Moment:
    """Return the moment. A date without a time is its midnight."""
    match = _TIME_OF_DAY.fullmatch(text.strip())
    try:
        if match is not None:
            return time(int(match[1]), int(match[2]), int(match[3] or 0))
        if _DATE.match(text.strip()):
            return datetime.fromisoformat(text.strip())
    except ValueError:
        raise UserError(f"'{text}' is not a time", hint=_MOMENT_HINT) from None
    try:
        seconds = parse_duration(text.strip().removeprefix("+"))
    except UserError as error:
        raise UserError(str(error), hint=_MOMENT_HINT) from None
    if seconds > LONGEST_S:
        raise UserError(f"'{text}' is more than ten years", hint=_MOMENT_HINT)
    return timedelta(seconds=seconds)


def last_moment(moment: Moment, now: datetime) -> datetime:
    """Return the latest such moment up to `now`, a local time without an offset."""
    if isinstance(moment, timedelta):
        return now - moment
    if isinstance(moment, datetime):
        return moment
    found = datetime.combine(now.date(), moment)
    return found if found <= now else found - timedelta(days=1)


def next_moment(moment: Moment, now: datetime) -> datetime:
    """Return the first such moment after `now`, a local time without an offset. A date is returned as it is."""
    if isinstance(moment, timedelta):
        return now + moment
    if isinstance(moment, datetime):
        return moment
    found = datetime.combine(now.date(), moment)
    return found if found > now else found + timedelta(days=1)
