"""Change many jobs at once, in a few SQL statements: to cancel, hold, release or retry a whole queue.

Only jobs without a live attempt are changed here, and only if the change concerns no other job: those with a part in
dependencies are left to `JobTransitions`, which changes them one by one. The result is the same.
"""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.control.transitions import JobTransitions
from gpuyard.core.job.job import PublishedEvent, PublishedEventKind
from gpuyard.core.job.lifecycle import FINISHED, TRANSITIONS, WAITING, JobEvent, JobState
from gpuyard.store.queue_queries import QueueQueries


class Change(Struct, frozen=True, kw_only=True):
    """The event that jobs in `states` get, and the reason that is recorded.

    `resets`: the jobs get all their retries, and their original memory need, again. `unnamed_only`: the change of a job
    with a name has to be checked against others with this name. `waits_for_time`: a job may have to wait for its time.
    """

    event: JobEvent
    states: frozenset[JobState]
    reason: str | None = None
    resets: bool = False
    unnamed_only: bool = False
    waits_for_time: bool = False

    @property
    def state(self) -> JobState:
        """The state that follows; it is the same for all `states`."""
        (state,) = {TRANSITIONS[before, self.event] for before in self.states}
        return state


def waiting_states(event: JobEvent) -> frozenset[JobState]:
    """Return the states without a live attempt, and not finished, that allow the event."""
    return frozenset(state for state in WAITING if (state, event) in TRANSITIONS)


CANCEL = Change(event=JobEvent.CANCEL, states=waiting_states(JobEvent.CANCEL), reason="cancelled")
HOLD = Change(event=JobEvent.HOLD, states=waiting_states(JobEvent.HOLD), reason="held until `gpuyard release`")
RELEASE = Change(event=JobEvent.RELEASE, states=waiting_states(JobEvent.RELEASE), waits_for_time=True)
RETRY = Change(event=JobEvent.REQUEUE, states=FINISHED, resets=True, unnamed_only=True)


def change_many(
    transitions: JobTransitions, queries: QueueQueries, change: Change, job_ids: Sequence[int], now: float
) -> list[int]:
    """Change those of these jobs that the change applies to and that no dependency concerns; return their ids.

    Jobs that finish are published as one event. Call it in a transaction.
    """
    state = change.state
    chosen = queries.independent_jobs(
        job_ids,
        sorted(change.states),
        unnamed_only=change.unnamed_only,
        ready_at=now if change.waits_for_time else None,
    )
    if not chosen:
        return []
    transitions.store.change_states(chosen, state, now, reason=change.reason, resets=change.resets)
    if change.resets:
        transitions.estimates.clear_cache()
    job = transitions.store.job(chosen[0])
    if state in FINISHED and job is not None:
        transitions.finished += len(chosen)
        kind = PublishedEventKind.FINISHED
        transitions.events.append(PublishedEvent(kind=kind, job=replace(job, state=state), at=now, jobs=len(chosen)))
    return chosen
