"""What has just happened to jobs, for those who count it or tell people of it."""

from enum import StrEnum

from msgspec import Struct

from gpuyard.core.job.job import Attempt, Job, Outcome


class PublishedEventKind(StrEnum):
    STARTED = "started"
    ENDED = "ended"  # an attempt: its job may be tried again
    FINISHED = "finished"  # a job: nothing more will come of it


class PublishedEvent(Struct, frozen=True, kw_only=True):
    """`job` is as it stands since then; `attempt` and `outcome` are those of its last run, where it had one."""

    kind: PublishedEventKind
    job: Job
    at: float
    attempt: Attempt | None = None
    outcome: Outcome | None = None
