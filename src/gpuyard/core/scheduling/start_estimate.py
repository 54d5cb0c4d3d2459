"""Estimate when leases end and when waiting jobs start."""

from collections.abc import Sequence

from gpuyard.core.scheduling.plan import PlannerView, Start, planned_lease_id
from gpuyard.core.scheduling.queue_order import Lane


def estimate_start(view: PlannerView, lane: Lane, ahead: int, likely_s: float | None) -> float | None:
    """Return roughly when a job with `ahead` jobs before it could start, each taking `likely_s`; None if unknown."""
    same = [run for run in view.running if (run.devices if lane.need.devices else run.takes_slot and not run.devices)]
    known = (view.ends_after(run.job_id) for run in same)
    ends = sorted(max(view.now, end) for end in known if end is not None)
    if not ends or len(ends) < len(same) or (ahead >= len(ends) and likely_s is None):
        return None
    return ends[ahead % len(ends)] + (ahead // len(ends)) * (likely_s or 0.0)


def earliest_ends(view: PlannerView, starts: Sequence[Start]) -> dict[str, float]:
    """Return when each lease of this queue could end at the earliest. A job of unknown end may end at any moment."""
    ends = {
        run.lease_id: max(view.now, view.ends_after(run.job_id) or view.now)
        for run in view.running
        if run.lease_id is not None
    }
    planned = {
        planned_lease_id(start.job_id): view.now + (view.estimate(start.job_id).least_s or 0.0) for start in starts
    }
    return ends | planned


def likely_ends(view: PlannerView, starts: Sequence[Start]) -> dict[str, float] | None:
    """Return when each lease should end; None where that is not known of all."""
    by_lease = {run.lease_id: view.ends_about(run.job_id) for run in view.running}
    ends = {lease.id: by_lease.get(lease.id) for lease in view.placement.leases}
    for start in starts:
        likely_s = view.estimate(start.job_id).likely_s
        ends[planned_lease_id(start.job_id)] = None if likely_s is None else view.now + likely_s
    known = {lease_id: max(view.now, at) for lease_id, at in ends.items() if at is not None}
    return known if len(known) == len(ends) else None
