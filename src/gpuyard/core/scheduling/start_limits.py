"""Limits on starts that hold for a whole lane, wherever its jobs would run: pauses, counts, and the pace of batches.

A job that waits for such a limit never becomes the head of the queue, so it delays no other job.
"""

import math

from gpuyard.core.lease import Claim
from gpuyard.core.scheduling.batch_pacing import PaceState, pace_refusals, watched_device_refusals
from gpuyard.core.scheduling.plan import PlannerView
from gpuyard.core.scheduling.queue_order import Lane
from gpuyard.core.scheduling.running_counts import RunningCounts, limit_reached
from gpuyard.core.scheduling.wait_reasons import Reason, ReasonKind


class StartLimits:
    """Counts running jobs and the starts of one plan, and refuses lanes that are at a limit."""

    def __init__(self, view: PlannerView) -> None:
        self._view = view
        self.counts = RunningCounts(view.running)
        self._last_starts = dict(view.last_starts)
        self._has_started_run = False

    def add_start(self, lane: Lane, claim: Claim) -> None:
        if not lane.resumes:  # a suspended job counts as running already
            self.counts.add(lane.tag, lane.group, lane.need.devices, takes_slot=lane.pace is None)
            self.counts.add_to_devices(lane.tag, (share.device_id for share in claim.shares))
            self._last_starts[lane.tag] = self._view.now
        self._has_started_run = self._has_started_run or lane.pace is not None

    def refusals(self, lane: Lane) -> tuple[Reason, ...]:  # noqa: PLR0911 - one for each limit
        """Return why no job of the lane may start now. Empty where one may."""
        view, limits, counts = self._view, self._view.limits, self.counts
        if lane.resumes:  # a suspended job counts as running already, and a pause does not stop running jobs
            return tuple(reason for reason in view.closed_reasons if reason.kind is not ReasonKind.PAUSED)
        if view.closed_reasons:
            return view.closed_reasons
        if lane.tag in view.stopped_tags:
            return (Reason(ReasonKind.PAUSED, "its workspace is stopped; `gpuyard workspace start` continues it"),)
        most = limits.tags.get(lane.tag)
        if most is not None and counts.by_tag.get(lane.tag, 0) >= most:
            return (limit_reached(ReasonKind.TAG_LIMIT, f"jobs tagged '{lane.tag}'", most),)
        if lane.group_limit is not None and counts.by_group.get(lane.group, 0) >= lane.group_limit:
            what = "jobs of its array" if lane.pace is None else "runs of its batch"
            return (limit_reached(ReasonKind.ARRAY_LIMIT, what, lane.group_limit),)
        if lane.pace is not None:
            return self._run_refusals(lane)
        if not lane.need.devices and counts.without_devices >= limits.cpu_jobs:
            return (limit_reached(ReasonKind.CPU_LIMIT, "jobs without a GPU", limits.cpu_jobs),)
        return ()

    def _run_refusals(self, lane: Lane) -> tuple[Reason, ...]:
        """Runs start one at a time, as the gates of their batch allow."""
        assert lane.pace is not None
        assert lane.group is not None
        if self._has_started_run:
            return (Reason(ReasonKind.STAGGERED, "another run is starting now"),)
        state, now = self._view.pace_states.get(lane.group, PaceState()), self._view.now
        watched = () if lane.need.devices else watched_device_refusals(lane.pace, state, lane.need, now)
        return (*pace_refusals(lane.pace, state, now), *watched)

    def stagger_refusals(self, lane: Lane) -> tuple[Reason, ...]:
        """Return why the tag's next job may not start yet: `stagger_s` has not passed since its last start."""
        if lane.tag_sharing is None:
            return ()
        last, now = self._last_starts.get(lane.tag, -math.inf), self._view.now
        next_at = last + lane.tag_sharing.stagger_s
        if not last <= now < next_at:  # a last start in the future comes from a clock that was set back: ignore it
            return ()
        return (Reason(ReasonKind.STAGGERED, f"the next task may start in {next_at - now:.1f} s"),)
