"""Lets jobs that the memory guard has suspended start anew on other devices (ADR 62).

A driver brings the memory of a suspended program back to its own devices only. While these stay full, other devices may
be idle for hours. A job that has been suspended for as long as it had run loses less by starting anew there than it
may lose by waiting on: together at most twice what the better choice would have cost.

- Only a job of the guard starts anew, and not with `--on-preempt never`, nor a run of a batch or a job whose tag has a
  rule of sharing: these have devices chosen for them.
- The planner finds the devices first. The job is stopped like any other, keeps its place, uses up no retry, and asks
  for the memory with which it would have resumed.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from gpuyard.control.live_jobs import Live
from gpuyard.control.transitions import JobTransitions
from gpuyard.core.job.job import OutcomeKind
from gpuyard.core.lease import Need
from gpuyard.core.memory.memory_guard import grown_need, restarts_at, room_to_restart
from gpuyard.core.scheduling.device_memory import capacity
from gpuyard.core.scheduling.plan import Restart
from gpuyard.core.snapshot import Snapshot
from gpuyard.core.units import format_duration


def restart_need(live: Live, to_resume: Need, now: float) -> Need | None:
    """Return what a suspended job needs to start anew on devices that it did not have, which is as much as it needs
    `to_resume`; None if it may not, or not yet."""
    spec = live.job.spec
    at = restarts_at(live.job, live.attempt, now)
    if at is None or now < at or spec.pace is not None or spec.tag_sharing is not None:
        return None
    most = max((memory for _, memory in to_resume.memory_on), key=lambda each: each.required_mb or 0.0, default=None)
    return replace(
        spec.need, memory=most or to_resume.memory, banned=(*spec.need.banned, *live.attempt.devices), host=None
    )


def restart_elsewhere(transitions: JobTransitions, restarts: Sequence[Restart], snapshot: Snapshot, now: float) -> None:
    """Stop the suspended jobs that the plan starts anew on other devices."""
    for restart in restarts:
        live = transitions.live[restart.job_id]
        attempt, devices = live.attempt, [snapshot.device(each.device_id) for each in restart.claim.shares]
        sizes_mb = [size for device in devices if device is not None and (size := capacity(device)) is not None]
        if attempt.reserved_mb is not None and sizes_mb:
            held_mb = (attempt.usage.peak_mb if attempt.usage is not None else None) or 0.0
            room_mb = room_to_restart(held_mb, attempt.reserved_mb, min(sizes_mb), foreign_mb=0.0)
            transitions.set_growth(restart.job_id, grown_need(live.job.growth, room_mb))
        waited = format_duration(now - (attempt.suspended_at or now))
        text = (
            f"its GPU has had too little free memory for {waited}, as long as it had run; it starts anew on another GPU"
        )
        transitions.stop(restart.job_id, OutcomeKind.MEMORY_GUARD, now, text)
