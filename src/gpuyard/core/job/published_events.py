"""Events of jobs that the controller publishes after each step, for metrics and notifications."""

from enum import StrEnum

from msgspec import Struct

from gpuyard.core.job.job import Attempt, Job, Outcome


class PublishedEventKind(StrEnum):
    STARTED = "started"
    ENDED = "ended"  # an attempt: its job may run again
    FINISHED = "finished"  # a job: it will not run again


class PublishedEvent(Struct, frozen=True, kw_only=True):
    """`job` is the job after the event; `attempt` is its last attempt, if it had one."""

    kind: PublishedEventKind
    job: Job
    at: float
    attempt: Attempt | None = None

    @property
    def outcome(self) -> Outcome | None:
        return None if self.attempt is None else self.attempt.outcome
