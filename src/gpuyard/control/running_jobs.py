"""Running jobs as the planner sees them, and when they are expected to end. Kept while they are as they were."""

import math
from collections.abc import Sequence

from gpuyard.control.live_jobs import LiveJobs
from gpuyard.control.transitions import JobTransitions
from gpuyard.core.job.job import Attempt, Job
from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.memory.estimates import Estimate
from gpuyard.core.progress.job_progress import JobProgress, time_left
from gpuyard.core.scheduling.preemption import RunningJob

# The earliest and the likely end of a running job; None if unknown.
ExpectedEnds = tuple[float | None, float | None]
_EARLY = 0.05


class RunningJobs:
    def __init__(self, transitions: JobTransitions) -> None:
        self._transitions = transitions
        self._listed: tuple[LiveJobs, int, list[RunningJob]] | None = None
        self._ends: dict[int, tuple[Attempt, int, ExpectedEnds]] = {}  # with the attempt and version they follow from

    def list(self) -> Sequence[RunningJob]:
        """Return the jobs with a live attempt; the same object while none of them has changed but for its usage."""
        live = self._transitions.live
        if self._listed is None or self._listed[0] is not live or self._listed[1] != live.version:
            self._listed = live, live.version, list_running(live)
        return self._listed[2]

    def ends_after(self, job_id: int) -> float | None:
        """Return the earliest time at which a running job may end, or None if unknown."""
        return self._ends_of(job_id)[0]

    def ends_about(self, job_id: int) -> float | None:
        """Return when a running job will likely end, or None if unknown."""
        return self._ends_of(job_id)[1]

    def _ends_of(self, job_id: int) -> ExpectedEnds:
        live, estimates = self._transitions.live, self._transitions.estimates
        attempt, known = live[job_id].attempt, self._ends.get(job_id)
        if known is not None and known[1] == estimates.version and _runs_alike(known[0], attempt):
            return known[2]
        if len(self._ends) > 2 * len(live) + 64:
            self._ends = {each: found for each, found in self._ends.items() if each in live}
        start, found = attempt.since + attempt.suspended_s, self._run_time(job_id, attempt)
        after, about = (None if seconds is None else start + seconds for seconds in (found.least_s, found.likely_s))
        self._ends[job_id] = attempt, estimates.version, (after, about)
        return after, about

    def _run_time(self, job_id: int, attempt: Attempt) -> Estimate:
        """Return how long an attempt runs in all: by its own progress if that says enough, else as earlier runs did."""
        learned = self._transitions.estimates.estimate_of(job_id)
        progress = None if attempt.usage is None else attempt.usage.progress
        return learned if progress is None else expected_run_time(progress, learned, self._transitions.live[job_id].job)


def expected_run_time(progress: JobProgress, learned: Estimate, job: Job) -> Estimate:
    """Return the run time by progress, within the time limit. The first twentieth says less than earlier runs."""
    left, fraction = time_left(progress, progress.at_s), progress.fraction
    if left is None or fraction is None or (fraction < _EARLY and learned.likely_s is not None):
        return learned
    limit = math.inf if job.spec.time_limit_s is None else job.spec.time_limit_s
    return Estimate(
        least_s=min(progress.at_s + left.least_s, limit),
        likely_s=min(progress.at_s + left.likely_s, limit),
        most_s=min(progress.at_s + left.most_s, limit + job.spec.grace_s),
    )


def list_running(live: LiveJobs) -> list[RunningJob]:
    """Return the jobs with a live attempt."""
    return [
        RunningJob(
            job_id=job.id,
            user=job.user,
            tag=job.spec.tag,
            devices=len(attempt.devices),
            started_at=attempt.since,
            suspended_s=attempt.suspended_s,
            group=job.group,
            lease_id=attempt.lease_id,
            priority=job.priority,
            is_leaving=job.state in (JobState.SUSPENDING, JobState.STOPPING),
            takes_slot=job.spec.pace is None and not attempt.engine,
            device_ids=attempt.devices,
        )
        for job, attempt in ((each.job, each.attempt) for each in live.values())
    ]


def _runs_alike(before: Attempt, now: Attempt) -> bool:
    is_as_far = (before.usage and before.usage.progress) is (now.usage and now.usage.progress)
    return before.phase is now.phase and before.suspended_s == now.suspended_s and is_as_far
