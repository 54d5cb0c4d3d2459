"""Whether a job that depends on others may start, has to wait, or can never start."""

from collections.abc import Iterable
from enum import StrEnum

from gpuyard.core.job.job import DependencyKind
from gpuyard.core.job.lifecycle import FINISHED, JobState


class DependencyOutlook(StrEnum):
    MET = "met"
    PENDING = "pending"
    NEVER = "never"


def outlook(kind: DependencyKind, state: JobState) -> DependencyOutlook:
    """Return what the state of the other job means for a dependency of this kind."""
    if state not in FINISHED:
        return DependencyOutlook.PENDING
    met = {
        DependencyKind.OK: state is JobState.SUCCEEDED,
        DependencyKind.ANY: True,
        DependencyKind.FAILED: state is JobState.FAILED,
    }
    return DependencyOutlook.MET if met[kind] else DependencyOutlook.NEVER


def outlook_of_all(others: Iterable[tuple[int, DependencyKind, JobState]]) -> tuple[DependencyOutlook, str | None]:
    """Return the worst outlook of all dependencies (job id, kind, state), and the reason if it is NEVER."""
    worst = DependencyOutlook.MET
    for job_id, kind, state in others:
        found = outlook(kind, state)
        if found is DependencyOutlook.NEVER:
            wanted = "" if kind is DependencyKind.OK else " (had to fail)"
            return found, f"skipped: dependency {job_id} {_PAST[state]}{wanted}"
        if found is DependencyOutlook.PENDING:
            worst = found
    return worst, None


_PAST = {
    JobState.SUCCEEDED: "succeeded",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "was cancelled",
    JobState.REJECTED: "was rejected",
}
