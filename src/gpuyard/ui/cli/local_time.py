"""Times of day in this shell's time zone, as the daemon gets them: with their offset."""

from datetime import datetime, timedelta

from gpuyard.errors import UserError
from gpuyard.model.selection import last_moment, next_moment, parse_moment
from gpuyard.model.units import parse_duration


def with_offset(text: str, *, is_next: bool = False) -> str:
    """Return the last such moment, or the next one, as a date with a time and an offset; a duration as it is."""
    moment = parse_moment(text)
    if isinstance(moment, timedelta):
        return text.replace(" ", "")
    now = datetime.now().replace(microsecond=0)  # noqa: DTZ005 - of this time zone
    try:
        return (next_moment if is_next else last_moment)(moment, now).astimezone().isoformat()
    except (ValueError, OverflowError):
        raise UserError(f"'{text}' is out of range", hint="write it as 22:00 or 2026-11-18T22:00") from None


def start_option(at: str | None, after: str | None) -> str:
    """Return the earliest start to send, of `--at` or `--in`."""
    if at is not None and after is not None:
        raise UserError("--at and --in both say when it starts", hint="leave out one of them")
    if after is not None:
        return f"+{parse_duration(after):f}s"
    return with_offset(at or "", is_next=True)
