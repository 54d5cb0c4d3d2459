"""Jobs that have a live attempt. Most of them just run: whoever is after the others need not look at them all."""

from collections.abc import Iterable

from msgspec import Struct

from gpuyard.core.job.job import Attempt, Job
from gpuyard.core.job.lifecycle import JobState


class Live(Struct, frozen=True, kw_only=True):
    job: Job
    attempt: Attempt


class LiveJobs(dict[int, Live]):
    """`apart` are those with a time limit and those that are being stopped or moved; `unpredicted` those of which
    nobody knew what they need on their devices."""

    def __init__(self, lives: Iterable[Live] = ()) -> None:
        super().__init__()
        self.apart: dict[int, Live] = {}
        self.unpredicted: dict[int, Live] = {}
        for live in lives:
            self[live.job.id] = live

    def __setitem__(self, job_id: int, live: Live) -> None:
        super().__setitem__(job_id, live)
        _note(self.apart, job_id, live, is_in=_is_apart(live))
        _note(self.unpredicted, job_id, live, is_in=_is_unpredicted(live))

    def take(self, job_id: int) -> Live:
        """It is over."""
        self.apart.pop(job_id, None)
        self.unpredicted.pop(job_id, None)
        return self.pop(job_id)


def _note(index: dict[int, Live], job_id: int, live: Live, *, is_in: bool) -> None:
    if is_in:
        index[job_id] = live
    elif job_id in index:
        del index[job_id]


def _is_apart(live: Live) -> bool:
    attempt = live.attempt
    is_plain = (
        live.job.state in (JobState.RUNNING, JobState.PENDING) and attempt.stopping is None and attempt.parked is None
    )
    return not is_plain or attempt.stop_at is not None or attempt.kill_at is not None


def _is_unpredicted(live: Live) -> bool:
    job, attempt = live.job, live.attempt
    return (
        job.spec.learns_memory
        and attempt.lease_id is not None
        and attempt.predicted_mb is None
        and not job.growth.count
    )
