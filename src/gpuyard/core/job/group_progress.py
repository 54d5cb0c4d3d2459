"""The progress of an array or a sweep, from the number of its jobs in each state."""

from collections.abc import Mapping

from gpuyard.core.job.lifecycle import FINISHED, LIVE, JobState

# The state of a group is the first of these that a job of it has.
_IN_ORDER = (
    JobState.RUNNING, JobState.RESUMING, JobState.STOPPING, JobState.PENDING, JobState.SUSPENDING, JobState.SUSPENDED,
    JobState.QUEUED, JobState.HELD, JobState.DELAYED, JobState.BLOCKED, JobState.FAILED, JobState.REJECTED,
    JobState.CANCELLED, JobState.SUCCEEDED,
)  # fmt: skip
# States that a line of progress names; a job that waits is one that it does not name.
_NAMED = (
    (JobState.FAILED, "failed"), (JobState.REJECTED, "rejected"), (JobState.CANCELLED, "cancelled"),
    (JobState.SUSPENDED, "suspended"), (JobState.HELD, "held"), (JobState.PENDING, "pending"),
)  # fmt: skip


def group_state(counts: Mapping[JobState, int]) -> JobState:
    """Return the state that stands for all: running if a job runs, and failed if all are over and one failed."""
    return next(state for state in _IN_ORDER if counts.get(state))


def progress_text(counts: Mapping[JobState, int]) -> str:
    """Return a text such as `12/40 done, 2 failed, 4 running`. Done are jobs that have finished, also those that
    failed; pending ones wait at their site."""
    done = sum(count for state, count in counts.items() if state in FINISHED)
    running = sum(count for state, count in counts.items() if state in LIVE - {JobState.SUSPENDED, JobState.PENDING})
    named = [f"{counts[state]:,} {word}" for state, word in _NAMED if counts.get(state)]
    if running:
        named.append(f"{running:,} running")
    return ", ".join([f"{done:,}/{sum(counts.values()):,} done", *named])
