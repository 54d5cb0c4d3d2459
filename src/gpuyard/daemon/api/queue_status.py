"""The state of the queue as a whole."""

from gpuyard.core.job.job import SuspendedBy
from gpuyard.core.job.lifecycle import JobState
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.schema.queue import QueueState


def queue_state(scheduler: SchedulerLoop) -> QueueState:
    store = scheduler.store
    return QueueState(
        paused=bool(store.setting("paused")),
        draining=bool(store.setting("draining")),
        counts={str(state): count for state, count in store.counts().items()},
    )


def count_under_way(scheduler: SchedulerLoop) -> int:
    """Return the number of live jobs that will end without a user's help: not those that a user suspended."""
    return sum(
        each.job.state is not JobState.SUSPENDED or each.attempt.parked is not SuspendedBy.BY_PERSON
        for each in scheduler.controller.transitions.live.values()
    )
