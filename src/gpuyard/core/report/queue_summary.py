"""What became of the jobs of a night: those that succeeded and failed since a moment, with the causes counted."""

from collections.abc import Iterable, Mapping
from datetime import datetime, time, timedelta

from msgspec import Struct

from gpuyard.core.job.lifecycle import LIVE, JobState
from gpuyard.core.job.selection import format_ids
from gpuyard.core.report.failure_groups import group_failures

EVENING = time(18)
_LEAST = timedelta(hours=6)
# The most causes that are listed one by one.
MOST_CAUSES = 50


class FailureCause(Struct, frozen=True, kw_only=True):
    """Jobs that failed for the same cause, as `ids` such as `3-5 9`. `first` is the first of them. In `text`, `…`
    stands for figures that differ; it is None for the jobs of all further causes together."""

    text: str | None
    count: int
    ids: str
    first: int


class FailedJob(Struct, frozen=True, kw_only=True):
    id: int
    error_line: str | None
    outcome_reason: str | None
    reason: str | None

    @property
    def cause(self) -> str:
        return self.error_line or self.outcome_reason or self.reason or "failed"


class FinishedJobs(Struct, frozen=True, kw_only=True):
    """Jobs that ended in a time: how many in each state, and those that failed."""

    counts: Mapping[JobState, int]
    failed: tuple[FailedJob, ...]


class JobsNow(Struct, frozen=True, kw_only=True):
    """How many jobs there are now. `waiting` ones start by themselves; `held` ones, and those that are `suspended`, may
    need a person."""

    running: int
    waiting: int
    held: int
    suspended: int


def default_since(now: datetime) -> datetime:
    """Return the start of the last night: the last 18:00 that was at least 6 h ago."""
    evening = datetime.combine(now.date(), EVENING)
    return evening if evening <= now - _LEAST else evening - timedelta(days=1)


def count_causes(failed: Iterable[FailedJob]) -> list[FailureCause]:
    """Return the causes of failures, the most frequent first."""
    groups = group_failures((job.id, job.cause) for job in failed)
    causes = [
        FailureCause(text=group.text, count=group.count, ids=format_ids(group.ids), first=group.ids[0])
        for group in groups[:MOST_CAUSES]
    ]
    others = sorted(job_id for group in groups[MOST_CAUSES:] for job_id in group.ids)
    if others:
        causes.append(FailureCause(text=None, count=len(others), ids=format_ids(others), first=others[0]))
    return causes


def count_jobs(counts: Mapping[JobState, int]) -> JobsNow:
    suspended = counts.get(JobState.SUSPENDED, 0)
    running = sum(counts.get(state, 0) for state in LIVE if state is not JobState.PENDING) - suspended
    waiting = sum(
        counts.get(state, 0) for state in (JobState.QUEUED, JobState.PENDING, JobState.DELAYED, JobState.BLOCKED)
    )
    return JobsNow(running=running, waiting=waiting, held=counts.get(JobState.HELD, 0), suspended=suspended)
