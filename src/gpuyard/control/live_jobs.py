"""Jobs with a live attempt, with indexes of those that a step looks at: most live jobs just run."""

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.core.job.job import Attempt, Job, Usage
from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.memory.watch_rate import holds_more_than_reserved


class Live(Struct, frozen=True, kw_only=True):
    job: Job
    attempt: Attempt

    def device_seconds(self, now: float) -> float:
        """Return for how long it has used its devices, together; a job without devices counts as one with one."""
        devices = self.job.spec.need.devices if self.attempt.engine else len(self.attempt.devices)
        return self.attempt.ran_s(now) * max(1, devices)


class LiveJobs(dict[int, Live]):
    """Live jobs by id, with indexes by id as well. `version` grows with each change but of usage.

    apart: jobs with a time limit, and those that are being stopped or suspended.
    unpredicted: jobs that started without a memory estimate.
    outgrown: jobs that were measured to hold more than they reserve.
    without_devices: jobs without a device of this machine.
    on_device: the jobs on each device. All are in the order in which the jobs became live.
    by_lease: the job that holds each lease, by the lease; of two jobs of a slice, the later one.
    """

    def __init__(self, lives: Iterable[Live] = ()) -> None:
        super().__init__()
        self.version = 0
        self.apart: dict[int, Live] = {}
        self.unpredicted: dict[int, Live] = {}
        self.outgrown: dict[int, Live] = {}
        self.without_devices: dict[int, Live] = {}
        self.on_device: dict[str, dict[int, Live]] = {}
        self.by_lease: dict[str, Live] = {}
        for live in lives:
            self[live.job.id] = live

    def __setitem__(self, job_id: int, live: Live) -> None:
        before = self.get(job_id)
        if before is not None and before.attempt.devices != live.attempt.devices:
            self._forget_devices(before)
        if before is not None and before.attempt.lease_id != live.attempt.lease_id:
            self._forget_lease(before)
        super().__setitem__(job_id, live)
        self.version += 1
        job, attempt = live.job, live.attempt
        just_runs = job.state in (JobState.RUNNING, JobState.PENDING) and not attempt.stopping and not attempt.parked
        is_apart = not just_runs or attempt.stop_at is not None or attempt.kill_at is not None
        has_estimate = attempt.predicted_mb is not None or job.growth.memory_mb is not None or job.growth.is_alone
        is_unpredicted = job.spec.learns_memory and attempt.lease_id is not None and not has_estimate
        _keep(self.apart, job_id, live, is_member=is_apart)
        _keep(self.unpredicted, job_id, live, is_member=is_unpredicted)
        _keep(self.outgrown, job_id, live, is_member=holds_more_than_reserved(attempt))
        _keep(self.without_devices, job_id, live, is_member=not attempt.devices)
        for device_id in attempt.devices:
            self.on_device.setdefault(device_id, {})[job_id] = live
        if attempt.lease_id is not None and (before is None or self._holds_lease(live)):
            self.by_lease[attempt.lease_id] = live

    def set_usage(self, job_id: int, usage: Usage) -> None:
        """Replace what a job was measured to use."""
        before = self[job_id]
        live = Live(job=before.job, attempt=replace(before.attempt, usage=usage))
        super().__setitem__(job_id, live)
        for index in (self.apart, self.unpredicted, self.without_devices):
            if job_id in index:
                index[job_id] = live
        _keep(self.outgrown, job_id, live, is_member=holds_more_than_reserved(live.attempt))
        for device_id in live.attempt.devices:
            self.on_device[device_id][job_id] = live
        if before.attempt.lease_id is not None and self._holds_lease(before):
            self.by_lease[before.attempt.lease_id] = live

    def take(self, job_id: int) -> Live:
        """Remove and return a job whose attempt is over."""
        self.version += 1
        for index in (self.apart, self.unpredicted, self.outgrown, self.without_devices):
            index.pop(job_id, None)
        live = self.pop(job_id)
        self._forget_devices(live)
        self._forget_lease(live)
        return live

    def _holds_lease(self, live: Live) -> bool:
        """Return whether no other job has taken over the lease."""
        holder = self.by_lease.get(live.attempt.lease_id or "")
        return holder is None or holder.job.id == live.job.id

    def _forget_lease(self, live: Live) -> None:
        if live.attempt.lease_id is not None and self._holds_lease(live):
            self.by_lease.pop(live.attempt.lease_id, None)

    def _forget_devices(self, live: Live) -> None:
        for device_id in live.attempt.devices:
            there = self.on_device[device_id]
            there.pop(live.job.id, None)
            if not there:
                del self.on_device[device_id]


def _keep(index: dict[int, Live], job_id: int, live: Live, *, is_member: bool) -> None:
    if is_member:
        index[job_id] = live
    else:
        index.pop(job_id, None)
