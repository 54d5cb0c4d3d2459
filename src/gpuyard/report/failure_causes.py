"""What failed, counted by cause, and the summary of a night.

Two texts have the same cause if they differ only in figures that vary from run to run (numbers, sizes, addresses,
random names), shown as "loss is NaN at step …". Numbers that name an error stay: an exit status, a signal, an errno."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, time, timedelta

from msgspec import Struct

from gpuyard.model.lifecycle import LIVE, JobState
from gpuyard.model.selection import format_ids

_VARIES = "…"
_FIGURE = re.compile(
    r"(?P<keep>\b(?:exit status|status|signal|errno|code|error|exitcode|http)\b[ =:]{0,3}-?\d{1,9}\b)"
    r"|\b0x[0-9a-f]{1,32}\b"
    r"|\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"
    r"|\b(?=[a-f]{0,39}\d)[0-9a-f]{8,64}\b"
    r"|\btmp\w{6,12}\b"
    r"|…|(?<![\w.])[-+]?\d{1,40}(?:[.,]\d{1,40}){0,10}(?:e[-+]?\d{1,5})?(?:\s?(?:bytes|[kmgtp]i?b)\b)?|\d{1,40}",
    re.IGNORECASE | re.ASCII,
)


def cause_key(text: str) -> str:
    """Return what texts with the same cause have in common."""
    return "".join(piece if is_fixed else _VARIES for piece, is_fixed in _pieces(text))


def merge_texts(first: str, second: str) -> str:
    """Return a text for two of the same cause, with `…` where they differ."""
    if first == second:
        return first
    pairs = zip(_pieces(first), _pieces(second), strict=False)
    return "".join(piece if piece == other else _VARIES for (piece, _), (other, _) in pairs)


class CauseTexts:
    """The causes of very many failures, as keys to count by. After `most` different causes, further ones get no key."""

    def __init__(self, most: float = math.inf) -> None:
        self._most = most
        self._texts: dict[str, str] = {}

    def key(self, text: str | None) -> str | None:
        if text is None:
            return None
        key = cause_key(text)
        known = self._texts.get(key)
        if known is None and len(self._texts) >= self._most:
            return None
        self._texts[key] = text if known is None else merge_texts(known, text)
        return key

    def text(self, key: str | None) -> str | None:
        return None if key is None else self._texts[key]


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the text (up to 300 characters) in pieces, each with whether it is the same for all texts of the cause."""
    text, at = text[:300], 0
    for found in _FIGURE.finditer(text):
        if found["keep"] is None:
            yield text[at : found.start()], True
            yield found[0], False
            at = found.end()
    yield text[at:], True


MOST_CAUSES = 50  # that are listed one by one


class FailureCause(Struct, frozen=True, kw_only=True):
    """Jobs that failed for the same cause, as `ids` such as `3-5 9`. `first` is the first of them. In `text`, `…`
    stands for figures that differ; it is None for the jobs of all further causes together."""

    text: str | None
    count: int
    ids: str
    first: int


class JobsNow(Struct, frozen=True, kw_only=True):
    """How many jobs there are. `waiting` ones start by themselves; `held` and `suspended` ones may need a person."""

    running: int
    waiting: int
    held: int
    suspended: int


def default_since(now: datetime) -> datetime:
    """Return the start of the last night: the last 18:00 that was at least 6 h ago."""
    evening = datetime.combine(now.date(), time(18))
    return evening if evening <= now - timedelta(hours=6) else evening - timedelta(days=1)


def count_causes(failures: Iterable[tuple[int, str]]) -> list[FailureCause]:
    """Count failed jobs, given with the texts of their causes: the most frequent cause first, then the one with the
    first job."""
    texts, jobs = CauseTexts(), defaultdict[str | None, list[int]](list)
    for job_id, text in sorted(failures):
        jobs[texts.key(text)].append(job_id)
    found = sorted(((texts.text(key), ids) for key, ids in jobs.items()), key=lambda each: (-len(each[1]), each[1]))
    rest = sorted(job_id for _, ids in found[MOST_CAUSES:] for job_id in ids)
    found[MOST_CAUSES:] = [(None, rest)] if rest else []
    return [FailureCause(text=text, count=len(ids), ids=format_ids(ids), first=ids[0]) for text, ids in found]


def count_jobs(counts: Mapping[JobState, int]) -> JobsNow:
    def count(*states: JobState) -> int:
        return sum(counts.get(state, 0) for state in states)

    suspended = count(JobState.SUSPENDED)
    return JobsNow(
        running=count(*LIVE) - count(JobState.PENDING) - suspended,
        waiting=count(JobState.QUEUED, JobState.PENDING, JobState.DELAYED, JobState.BLOCKED),
        held=count(JobState.HELD),
        suspended=suspended,
    )
