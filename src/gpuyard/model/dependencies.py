"""Dependencies of a job, and whether it may start, has to wait, or can never start.

A job has up to three sets, and all have to be met: all of `ok` have to succeed, all of `any` to end, one of `failed` to
fail. A job that is retried automatically has not ended: its last attempt decides.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TypeAlias

from msgspec import Struct

from gpuyard.model.lifecycle import FINISHED, JobState
from gpuyard.model.selection import format_ids

SKIPPED = "skipped: "
# Ends the reason of a job that was held when it was skipped: it is held again if it is revived.
WAS_HELD = "; it was held"
MOST_NAMED = 20


class DependencyKind(StrEnum):
    OK = "ok"
    ANY = "any"
    FAILED = "failed"


class Dependency(Struct, frozen=True, kw_only=True):
    job_id: int
    kind: DependencyKind = DependencyKind.OK


# The other job's id, the kind, and the other job's state.
DependencyState: TypeAlias = tuple[int, DependencyKind, JobState]


class DependencyOutlook(StrEnum):
    MET = "met"
    PENDING = "pending"
    NEVER = "never"


def outlook(kind: DependencyKind, state: JobState) -> DependencyOutlook:
    """Return what the state of the other job means for a dependency of this kind that is a set of its own."""
    if state not in FINISHED:
        return DependencyOutlook.PENDING
    wanted = {DependencyKind.OK: JobState.SUCCEEDED, DependencyKind.ANY: state, DependencyKind.FAILED: JobState.FAILED}
    return DependencyOutlook.MET if state is wanted[kind] else DependencyOutlook.NEVER


def outlook_of_all(others: Iterable[DependencyState]) -> tuple[DependencyOutlook, str | None]:
    """Return the worst outlook of all sets, and the reason if it is NEVER."""
    others = list(others)
    lost = unmeetable(others)
    if not lost:
        return DependencyOutlook.PENDING if awaited(others) else DependencyOutlook.MET, None
    lost = [each for each in lost if each[1] is DependencyKind.OK][:1] or lost
    ids = [job_id for job_id, _, _ in lost]
    if len(ids) > 1:
        more = f" and {len(ids) - MOST_NAMED} more" if len(ids) > MOST_NAMED else ""
        text = f"none of the dependencies {format_ids(ids[:MOST_NAMED])}{more} failed (one had to)"
        return DependencyOutlook.NEVER, f"{SKIPPED}{text}"
    _, kind, state = lost[0]
    past = f"was {state}" if state in (JobState.CANCELLED, JobState.REJECTED) else str(state)
    had_to_fail = " (had to fail)" if kind is DependencyKind.FAILED else ""
    return DependencyOutlook.NEVER, f"{SKIPPED}dependency {ids[0]} {past}{had_to_fail}"


def unmeetable(others: Sequence[DependencyState]) -> list[DependencyState]:
    """Return those that ended otherwise than the job needs: of a `failed` set, all or none."""
    had_to_fail = [each for each in others if each[1] is DependencyKind.FAILED]
    is_hopeless = all(map(_is_lost, had_to_fail))
    return [each for each in others if _is_lost(each) and (each[1] is DependencyKind.OK or is_hopeless)]


def awaited(others: Sequence[DependencyState]) -> list[DependencyState]:
    """Return those that the job still waits for: without the rest of a `failed` set in which a job has failed."""
    has_failed = any(kind is DependencyKind.FAILED and state is JobState.FAILED for _, kind, state in others)
    return [
        each for each in others if each[2] not in FINISHED and not (has_failed and each[1] is DependencyKind.FAILED)
    ]


def was_skipped(reason: str | None) -> bool:
    """Return whether a rejected job has this reason because of its dependencies."""
    return reason is not None and reason.startswith(SKIPPED)


def _is_lost(other: DependencyState) -> bool:
    return outlook(other[1], other[2]) is DependencyOutlook.NEVER
