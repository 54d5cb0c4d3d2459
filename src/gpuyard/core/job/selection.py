"""Selections of jobs as users write them: `17`, `17-20`, `state=failed`, `tag=night`, `name=big`, `since=22:00`, `all`.

Every kind of word narrows the selection: a job is selected if it has one of the ids and meets each condition.
- Ids, ranges and values of one key are alternatives: `17 20-22`, `state=failed,cancelled`, `tag=a tag=b`.
- `since=` is when a job was submitted or ended, at that time or later.
- `all` is every job: it says that no id and no condition was forgotten.
"""

import re
from collections.abc import Iterable, Iterator

from msgspec import Struct

from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.job.moments import parse_moment
from gpuyard.errors import UserError

_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)
# As many ranges of ids as fit into the first line of a request.
MOST_RANGES = 500
KEYS = ("name", "tag", "user", "state", "since")
_HINT = "write an id as 17, a range as 17-20, or state=failed, tag=night, name=big, since=22:00, all"


class JobSelection(Struct, frozen=True, kw_only=True):
    """`ranges` are pairs of a first and a last id. A condition that is empty does not apply. `since` is a moment as
    text (`moments.py`), and `since_at` its queue time, once that is known."""

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
        else:
            ranges.append(_range(word))
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
    values = (
        ("state", selection.states),
        ("tag", selection.tags),
        ("name", selection.names),
        ("user", selection.users),
        ("since", (selection.since,) if selection.since else ()),
    )
    return " ".join(f"{key}={','.join(wanted)}" for key, wanted in values if wanted)


def format_ids(ids: Iterable[int]) -> str:
    """Return ids in order, with neighbours as a range: `3 17-20`."""
    spans: list[list[int]] = []
    for job_id in sorted(ids):
        if spans and job_id == spans[-1][1] + 1:
            spans[-1][1] = job_id
        else:
            spans.append([job_id, job_id])
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


def _range(word: str) -> tuple[int, int]:
    match = _RANGE.fullmatch(word)
    if match is None:
        raise UserError(f"'{word}' names no job", hint=_HINT)
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise UserError(f"'{word}' is an empty range", hint=f"did you mean {last}-{first}?")
    return first, last
