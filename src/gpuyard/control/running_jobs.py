"""Running jobs as the planner sees them, and when they are expected to end."""

import math

from gpuyard.control.live_jobs import Live
from gpuyard.control.transitions import JobTransitions
from gpuyard.core.job.job import Job
from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.memory.estimates import Estimate
from gpuyard.core.progress.job_progress import JobProgress, time_left
from gpuyard.core.scheduling.world import RunningJob

_EARLY = 0.05


def running_jobs(transitions: JobTransitions) -> tuple[RunningJob, ...]:
    """Return the jobs with a live attempt."""
    return tuple([_running(live, transitions) for live in transitions.live.values()])


def _running(live: Live, transitions: JobTransitions) -> RunningJob:
    job, attempt = live.job, live.attempt
    start, expected = attempt.since + attempt.suspended_s, run_time(live, transitions)
    return RunningJob(
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
        ends_after=None if expected.least_s is None else start + expected.least_s,
        ends_about=None if expected.likely_s is None else start + expected.likely_s,
    )


def run_time(live: Live, transitions: JobTransitions) -> Estimate:
    """Return how long an attempt runs in all: by its own progress if that says enough, else as earlier runs did."""
    learned = transitions.estimates.estimate_of(live.job.id)
    progress = None if live.attempt.usage is None else live.attempt.usage.progress
    return learned if progress is None else expected_run_time(progress, learned, live.job)


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
