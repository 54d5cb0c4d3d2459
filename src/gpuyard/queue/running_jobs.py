"""Running jobs as the planner sees them: their expected ends, the power that they draw, and the load on their
devices.
"""

import math
from collections.abc import Sequence

from msgspec.structs import replace

from gpuyard.model.job import Job
from gpuyard.model.job_progress import JobProgress, time_left
from gpuyard.model.lifecycle import JobState
from gpuyard.policy.estimates import Estimate
from gpuyard.policy.machine import Packing
from gpuyard.policy.numbers import MOST_PER_DEVICE
from gpuyard.policy.queue_order import LaneQueue
from gpuyard.policy.sharing import assumed_load, depth_limit
from gpuyard.policy.world import PowerLimit, RunningJob
from gpuyard.queue.live_attempts import Live
from gpuyard.queue.transitions import JobTransitions

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


# A running job of unknown draw that was measured for this long shows what it draws.
_SHOWN_S = 30.0
# In RAM: it draws nothing.
_MOVED_OUT = (JobState.SUSPENDED, JobState.RESUMING)


def power_limit(limit_w: float | None, transitions: JobTransitions) -> PowerLimit | None:
    """Return the limit with what jobs draw; None without a limit."""
    if limit_w is None:
        return None
    estimates, live = transitions.estimates, transitions.live.values()
    running = [each for each in live if each.attempt.devices and each.job.state not in _MOVED_OUT]
    return PowerLimit(
        limit_w=limit_w,
        running_w={each.job.id: _draw_w(each, estimates.power_w(each.job)) for each in running},
    )


def _draw_w(live: Live, learned_w: float | None) -> float | None:
    """Return the power per GPU: the learned or the measured one, whichever is higher; None: unknown."""
    energy = None if live.attempt.usage is None else live.attempt.usage.energy
    measured_w = None if energy is None else energy.peak_w
    if energy is None or measured_w is None:
        return learned_w
    if learned_w is None:
        return measured_w if energy.seconds >= _SHOWN_S * len(live.attempt.devices) else None
    return max(learned_w, measured_w)


# With this least gain, memory alone decides which jobs share a device.
_MEMORY_ALONE_PERCENT = -100.0


def lease_loads(transitions: JobTransitions, now: float) -> dict[str, float]:
    """Return the load of each running job by its lease, as far as it was measured."""
    found: dict[str, float] = {}
    for live in transitions.live.values():
        attempt = live.attempt
        if attempt.lease_id is not None and attempt.usage is not None:
            found[attempt.lease_id] = assumed_load(attempt.usage.load_percent, attempt.ran_s(now))
    return found


def packing_now(transitions: JobTransitions, packing: Packing, queues: Sequence[LaneQueue], devices: int) -> Packing:
    """Return the limits of sharing with the present number of jobs for the usable devices."""
    least = packing.min_gain_percent
    if least is None or least <= _MEMORY_ALONE_PERCENT or devices < 2:
        return packing
    jobs, most = sum(len(each.attempt.devices) for each in transitions.live.values()), MOST_PER_DEVICE * devices
    waiting = (queue.lane for queue in queues if not queue.lane.resumes and not queue.lane.engine)
    queued = transitions.store.count_queued([lane.id for lane in waiting if lane.need.devices], most)
    return replace(packing, depth=depth_limit(jobs + queued, devices))
