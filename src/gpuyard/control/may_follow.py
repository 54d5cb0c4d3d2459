"""Which jobs may follow others without a step in between (`successors.py`), and for how long."""

import math
from collections.abc import Mapping

from gpuyard.control.live_jobs import Live
from gpuyard.core.job.job import Growth, Job
from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.lease import Need
from gpuyard.core.scheduling.plan import Plan
from gpuyard.core.scheduling.queue_order import Lane
from gpuyard.core.scheduling.world import World

# How long jobs follow each other on a lease for which others wait.
_TURN_S = 0.25


def lane_may_follow(lane: Lane) -> bool:
    """Return whether jobs of a lane can take the place of each other."""
    if lane.engine or lane.resumes or lane.preempts or lane.pace is not None or lane.tag_sharing is not None:
        return False
    return not lane.stagger_s and not lane.writes_files


def job_may_follow(job: Job) -> bool:
    """Return whether a job can take the place of one with the same spec."""
    spec = job.spec
    if spec.container is not None or spec.task is not None or spec.code.snapshot is not None or spec.filled_variables:
        return False
    if job.is_unreadable:
        return False
    return spec.output is None and spec.error is None and not spec.split_stderr and job.growth == Growth()


def is_stopping(live: Live) -> bool:
    """Return whether a job is stopped or suspended, or about to be."""
    return (
        live.job.state is not JobState.RUNNING or live.attempt.stopping is not None or live.attempt.parked is not None
    )


def is_held_up(plan: Plan, view: World) -> bool:
    """Return whether more than the lack of free devices decides what starts next."""
    return bool(plan.preempts or view.closed_reasons or view.start_caps)


def turn_ends(need: Need, since: Mapping[int, float], view: World) -> dict[int, float]:
    """Return when jobs with this need have followed each other for long enough in each place. `since` is the beginning
    of its lease. Other programs may wait in the ledger for what an end gives back; if one of them has a higher
    priority, the turn ends now."""
    if not view.tickets or not (need.devices or need.host is not None):
        return dict.fromkeys(since, math.inf)
    is_urgent = any(ticket.priority > view.lanes[0].lane.priority for ticket in view.tickets)
    return {place: view.now if is_urgent else begin + _TURN_S for place, begin in since.items()}
