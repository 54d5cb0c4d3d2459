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
from gpuyard.core.lease import FixedMemory, Need, WholeDevice
from gpuyard.core.memory.memory_guard import grown_need, restarts_at
from gpuyard.core.units import format_duration


def restart_need(live: Live, now: float) -> Need | None:
    """Return what a suspended job needs to start anew on devices that it did not have; None if it may not, or not
    yet."""
    spec, attempt = live.job.spec, live.attempt
    at = restarts_at(live.job, attempt, now)
    if at is None or now < at or spec.pace is not None or spec.tag_sharing is not None:
        return None
    memory = WholeDevice() if attempt.reserved_mb is None else FixedMemory(attempt.reserved_mb)
    return replace(spec.need, memory=memory, banned=(*spec.need.banned, *attempt.devices), host=None)


def restart_elsewhere(transitions: JobTransitions, job_ids: Sequence[int], now: float) -> None:
    """Stop the suspended jobs that the plan starts anew on other devices."""
    for job_id in job_ids:
        live = transitions.live[job_id]
        if live.attempt.reserved_mb is not None:
            transitions.set_growth(job_id, grown_need(live.job.growth, live.attempt.reserved_mb))
        waited_s = now - (live.attempt.suspended_at or now)
        text = (
            f"its GPU has had too little free memory for {format_duration(waited_s)}, as long as it had run; "
            "it starts anew on another GPU"
        )
        transitions.stop(job_id, OutcomeKind.MEMORY_GUARD, now, text)
