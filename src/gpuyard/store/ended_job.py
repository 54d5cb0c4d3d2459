"""A job whose attempt has ended, as it is stored."""

from typing import Any

from msgspec import Struct

from gpuyard.core.job.job import Attempt, OutcomeKind
from gpuyard.core.job.lifecycle import JobState
from gpuyard.store.row_codec import printable, to_json

# Of an attempt in a slice, the start may be stored with its end alone.
END_JOB = (
    "UPDATE jobs SET state = ?, reason = ?, due_at = ?, ended_at = ?, outcome = ?, failures = ?, "
    "queued_at = coalesce(?, queued_at), started_at = coalesce(?, started_at) "
    "WHERE id = ?"
)


class EndedJob(Struct, frozen=True, kw_only=True):
    """`attempt` is over. `queued_at` is set if the job waits again, and not in its old place."""

    attempt: Attempt
    state: JobState
    reason: str | None
    due_at: float | None
    ended_at: float | None
    failures: int
    queued_at: float | None

    @property
    def never_started(self) -> bool:
        outcome = self.attempt.outcome
        return outcome is not None and outcome.kind is OutcomeKind.NEVER_STARTED

    def to_row(self) -> tuple[Any, ...]:
        """Return the values of END_JOB."""
        attempt, outcome = self.attempt, to_json(self.attempt.outcome)
        columns = (self.state, printable(self.reason), self.due_at, self.ended_at, outcome, self.failures)
        return (*columns, self.queued_at, attempt.started_at, attempt.job_id)
