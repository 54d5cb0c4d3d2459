"""Whether a job that waits for others may go on, has to wait, or never will."""

from collections.abc import Iterable
from enum import StrEnum

from gpuyard.core.job.job import DependencyKind
from gpuyard.core.job.lifecycle import FINISHED, JobState


class DependencyOutlook(StrEnum):
    MET = "met"
    PENDING = "pending"
    NEVER = "never"


def prospect(kind: DependencyKind, state: JobState) -> DependencyOutlook:
    """What the other job's state means for one that waits for it."""
    if state not in FINISHED:
        return DependencyOutlook.PENDING
    met = {
        DependencyKind.OK: state is JobState.SUCCEEDED,
        DependencyKind.ANY: True,
        DependencyKind.FAILED: state is JobState.FAILED,
    }
    return DependencyOutlook.MET if met[kind] else DependencyOutlook.NEVER


def prospect_of_all(others: Iterable[tuple[int, DependencyKind, JobState]]) -> tuple[DependencyOutlook, str | None]:
    """The worst of them, and the reason where it is NEVER."""
    worst = DependencyOutlook.MET
    for job_id, kind, state in others:
        found = prospect(kind, state)
        if found is DependencyOutlook.NEVER:
            wanted = {"ok": "succeed", "failed": "fail"}[kind]
            return found, f"job {job_id} was to {wanted} first, and it {_PAST[state]}"
        if found is DependencyOutlook.PENDING:
            worst = found
    return worst, None


_PAST = {
    JobState.SUCCEEDED: "succeeded",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "was cancelled",
    JobState.REJECTED: "was rejected",
}
