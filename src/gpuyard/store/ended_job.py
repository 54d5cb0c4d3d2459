"""A job whose attempt has ended, as it is stored. Dozens of short jobs end in one step, and share SQL statements."""

from typing import Any

from msgspec import Struct

from gpuyard.core.job.job import Attempt, OutcomeKind
from gpuyard.core.job.lifecycle import JobState
from gpuyard.store.row_codec import printable, to_json

# An attempt that is stored with its end alone also sets what `start_attempt` sets.
END_JOB = (
    "UPDATE jobs SET state = ?, reason = ?, due_at = ?, ended_at = ?, outcome = ?, failures = ?, "
    "queued_at = coalesce(?, queued_at), attempts = coalesce(?, attempts), started_at = coalesce(?, started_at) "
    "WHERE id = ?"
)


class EndedJob(Struct, frozen=True, kw_only=True):
    """`attempt` is over. `is_stored` is False if its start was not stored. `queued_at` is set if the job waits again,
    and not in its old place."""

    attempt: Attempt
    is_stored: bool
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
        attempt, is_new = self.attempt, not self.is_stored and not self.never_started
        start = (attempt.number, attempt.started_at) if is_new else (None, None)
        outcome, reason = to_json(attempt.outcome), printable(self.reason)
        columns = (self.state, reason, self.due_at, self.ended_at, outcome, self.failures, self.queued_at)
        return (*columns, *start, attempt.job_id)
