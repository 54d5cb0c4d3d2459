"""How the queue stands as a whole."""

from gpuyard.core.job.job import SuspendedBy
from gpuyard.core.job.lifecycle import JobState
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.server.router import Answer


def standing(scheduler: SchedulerLoop) -> Answer:
    store = scheduler.store
    return {
        "paused": bool(store.setting("paused")),
        "draining": bool(store.setting("draining")),
        "counts": {str(state): count for state, count in store.counts().items()},
    }


def under_way(scheduler: SchedulerLoop) -> int:
    """How many come to their end by themselves: not those that were suspended by hand."""
    return sum(
        each.job.state is not JobState.SUSPENDED or each.attempt.parked is not SuspendedBy.BY_PERSON
        for each in scheduler.controller.transitions.live.values()
    )
