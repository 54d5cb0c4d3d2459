"""Which jobs a user means, by ids and conditions such as `state=failed` or `since=22:00`; and moments as users write
them. A time of day is the last one for what has happened (`since=`), and the next one for what will (`--at`).
"""

import re
from collections.abc import Iterable, Iterator
from datetime import datetime, time, timedelta

from msgspec import Struct

from gpuyard.errors import UserError
from gpuyard.model.lifecycle import JobState
from gpuyard.model.units import parse_duration

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


# As many ranges of ids as fit into the first line of a request.
MOST_RANGES = 500
KEYS = ("name", "tag", "user", "state", "since")


class JobSelection(Struct, frozen=True, kw_only=True):
    """`ranges` are of ids. An empty condition does not apply. `since_at` is the queue time of `since`, once known."""

    ranges: tuple[tuple[int, int], ...] = ()
    names: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    is_all: bool = False
    states: tuple[JobState, ...] = ()
    users: tuple[str, ...] = ()
    since: str = ""
    since_at: float | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.ranges or self.is_all or self.has_conditions)

    @property
    def has_conditions(self) -> bool:
        """Whether it has to be looked up which jobs it selects."""
        return bool(self.names or self.tags or self.users or self.states or self.since)

    @property
    def names_each_job(self) -> bool:
        """Whether each job is named by its own id."""
        return bool(self.ranges) and not self.has_conditions and all(first == last for first, last in self.ranges)

    @property
    def is_lasting(self) -> bool:
        """Whether the same jobs are selected whatever happens to them."""
        return not self.states and not self.since


def parse_selection(text: str) -> JobSelection:
    ranges: list[tuple[int, int]] = []
    values: dict[str, list[str]] = {key: [] for key in KEYS}
    is_all = False
    for key, word in _words(text):
        if key:
            values[key].append(word)
        elif word == "all":
            is_all = True
        elif (match := re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", word, re.ASCII)) is None:
            hint = "write an id as 17, a range as 17-20, or state=failed, tag=night, name=big, since=22:00, all"
            raise UserError(f"'{word}' names no job", hint=hint)
        else:
            first, last = int(match[1]), int(match[2] or match[1])
            if last < first:
                raise UserError(f"'{word}' is an empty range", hint=f"did you mean {last}-{first}?")
            ranges.append((first, last))
    if len(values["since"]) > 1:
        raise UserError("since= is given several times", hint="give it once")
    for since in values["since"]:
        parse_moment(since)
    return JobSelection(
        ranges=tuple(ranges),
        names=tuple(values["name"]),
        tags=tuple(values["tag"]),
        users=tuple(values["user"]),
        states=tuple(map(parse_state, values["state"])),
        since="".join(values["since"]),
        is_all=is_all,
    )


def parse_state(word: str) -> JobState:
    try:
        return JobState(word)
    except ValueError:
        raise UserError(f"'{word}' is not a state", hint=f"it can be {', '.join(JobState)}") from None


def _words(text: str) -> Iterator[tuple[str, str]]:
    """Yield keys with their values; ids and `all` have an empty key. After a comma, a value has the key before it."""
    for group in text.split():
        before = ""
        for word in filter(None, group.split(",")):
            key, equals, value = word.partition("=")
            if equals and key in KEYS and value and value.isprintable():  # as all names are
                before = key
                yield key, value
            elif before and not equals and word.isprintable():
                yield before, word
            else:
                yield "", word


def describe_conditions(selection: JobSelection) -> str:
    """Return the conditions as a user would write them, without ids."""
    values = {"state": selection.states, "tag": selection.tags, "name": selection.names, "user": selection.users}
    texts = [f"{key}={','.join(wanted)}" for key, wanted in values.items() if wanted]
    return " ".join([*texts, *([f"since={selection.since}"] if selection.since else [])])


def format_ids(ids: Iterable[int]) -> str:
    """Return ids in order, with neighbours as a range: `3 17-20`."""
    spans = merge_ranges((job_id, job_id) for job_id in ids)
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges in order, with overlapping and adjacent ones merged."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged
