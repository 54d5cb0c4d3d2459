"""Jobs with a live attempt, with an index of those that need attention: most live jobs just run."""

from collections.abc import Iterable

from msgspec import Struct

from gpuyard.core.job.job import Attempt, Job
from gpuyard.core.job.lifecycle import JobState


class Live(Struct, frozen=True, kw_only=True):
    job: Job
    attempt: Attempt

    def device_seconds(self, now: float) -> float:
        """Return for how long it has used its devices, together; a job without devices counts as one with one."""
        devices = self.job.spec.need.devices if self.attempt.engine else len(self.attempt.devices)
        return self.attempt.ran_s(now) * max(1, devices)


class LiveJobs(dict[int, Live]):
    """Live jobs by id. `apart` has those with a time limit and those that are being stopped or suspended;
    `unpredicted` has those that started without a memory estimate."""

    def __init__(self, lives: Iterable[Live] = ()) -> None:
        super().__init__()
        self.apart: dict[int, Live] = {}
        self.unpredicted: dict[int, Live] = {}
        for live in lives:
            self[live.job.id] = live

    def __setitem__(self, job_id: int, live: Live) -> None:
        super().__setitem__(job_id, live)
        job, attempt = live.job, live.attempt
        just_runs = job.state in (JobState.RUNNING, JobState.PENDING) and not attempt.stopping and not attempt.parked
        is_apart = not just_runs or attempt.stop_at is not None or attempt.kill_at is not None
        has_estimate = attempt.predicted_mb is not None or job.growth.memory_mb is not None or job.growth.is_alone
        is_unpredicted = job.spec.learns_memory and attempt.lease_id is not None and not has_estimate
        for index, is_member in ((self.apart, is_apart), (self.unpredicted, is_unpredicted)):
            if is_member:
                index[job_id] = live
            else:
                index.pop(job_id, None)

    def take(self, job_id: int) -> Live:
        """Remove and return a job whose attempt is over."""
        self.apart.pop(job_id, None)
        self.unpredicted.pop(job_id, None)
        return self.pop(job_id)
