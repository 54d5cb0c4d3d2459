"""Selections of jobs as users write them: `17`, `17-20`, `name=big`, `tag=night`, `all`, in any combination."""

import re
from collections.abc import Iterable

from msgspec import Struct

from gpuyard.core.job.lifecycle import JobState
from gpuyard.errors import UserError

_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)


class JobSelection(Struct, frozen=True, kw_only=True):
    ranges: tuple[tuple[int, int], ...] = ()  # pairs of a first and a last id
    names: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    is_all: bool = False
    states: tuple[JobState, ...] = ()  # if not empty, only jobs in these states are selected

    @property
    def is_empty(self) -> bool:
        return not (self.ranges or self.names or self.tags or self.is_all)


def parse_selection(text: str) -> JobSelection:
    ranges: list[tuple[int, int]] = []
    names: list[str] = []
    tags: list[str] = []
    is_all = False
    for word in text.replace(",", " ").split():
        key, equals, value = word.partition("=")
        if equals and key in ("name", "tag") and value and value.isprintable():  # as all names are
            (names if key == "name" else tags).append(value)
        elif word == "all":
            is_all = True
        else:
            ranges.append(_range(word))
    return JobSelection(ranges=tuple(ranges), names=tuple(names), tags=tuple(tags), is_all=is_all)


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
        raise UserError(
            f"'{word}' names no job", hint="write an id as 17, a range as 17-20, or name=big, tag=night, all"
        )
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise UserError(f"'{word}' is an empty range", hint=f"did you mean {last}-{first}?")
    return first, last
