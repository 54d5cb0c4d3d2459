"""The earliest start that a user asked for, as a time of the queue."""

from datetime import datetime, timedelta

from gpuyard.core.job.moments import next_moment, parse_moment
from gpuyard.errors import UserError
from gpuyard.ports import Clock

_LONGEST_S = 3660 * 86400.0


def read_start_time(text: str, clock: Clock) -> float:
    """Return the queue time of a moment such as `22:00`, a time of day of this machine, or `+2h`. UserError if it is
    over: a date that is past is a mistake."""
    now = clock.now()
    moment = parse_moment(text)
    if isinstance(moment, timedelta):
        return now + moment.total_seconds()
    try:
        local = datetime.fromtimestamp(clock.to_wall(now))  # noqa: DTZ006 - local time
        at = clock.from_wall(next_moment(moment, local).timestamp())
    except (ValueError, OverflowError, OSError):  # years that this system's clock does not know
        raise UserError(f"--at {text} is out of range", hint="write it as 22:00 or 2026-11-18T22:00") from None
    if at < now - 1.0:
        raise UserError(f"--at {text} is past", hint="leave it out to start now")
    if at > now + _LONGEST_S:
        raise UserError(f"--at {text} is more than ten years from now", hint="write it as 22:00 or 2026-11-18T22:00")
    return at
