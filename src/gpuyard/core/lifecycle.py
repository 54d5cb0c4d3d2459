"""The life of a job as one table: in which state what may happen, and what it leads to.

- `held` waits for a person, `blocked` for other jobs, `delayed` for a time, `queued` for devices.
- A job has a live attempt exactly while it is `running` or `stopping`.
- A finished job begins anew only when a person says so.
Whatever is not in the table cannot happen; `advance` says what can.
"""

from enum import StrEnum

from gpuyard.errors import UserError


class JobState(StrEnum):
    HELD = "held"
    BLOCKED = "blocked"
    DELAYED = "delayed"
    QUEUED = "queued"
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"


class JobEvent(StrEnum):
    HOLD = "hold"
    RELEASE = "release"
    BLOCK = "block"
    UNBLOCK = "unblock"
    DUE = "due"
    START = "start"
    STOP = "stop"
    SUCCEED = "succeed"
    FAIL = "fail"
    CANCEL = "cancel"
    RETRY = "retry"
    REQUEUE = "requeue"
    REJECT = "reject"


S, E = JobState, JobEvent

TRANSITIONS: dict[tuple[JobState, JobEvent], JobState] = {
    (S.BLOCKED, E.UNBLOCK): S.QUEUED,
    (S.BLOCKED, E.HOLD): S.HELD,
    (S.BLOCKED, E.CANCEL): S.CANCELLED,
    (S.BLOCKED, E.REJECT): S.REJECTED,
    (S.HELD, E.RELEASE): S.QUEUED,
    (S.HELD, E.BLOCK): S.BLOCKED,
    (S.HELD, E.CANCEL): S.CANCELLED,
    (S.HELD, E.REJECT): S.REJECTED,
    (S.DELAYED, E.DUE): S.QUEUED,
    (S.DELAYED, E.HOLD): S.HELD,
    (S.DELAYED, E.CANCEL): S.CANCELLED,
    (S.QUEUED, E.START): S.RUNNING,
    (S.QUEUED, E.HOLD): S.HELD,
    (S.QUEUED, E.CANCEL): S.CANCELLED,
    (S.QUEUED, E.REJECT): S.REJECTED,
    (S.RUNNING, E.SUCCEED): S.SUCCEEDED,
    (S.RUNNING, E.FAIL): S.FAILED,
    (S.RUNNING, E.RETRY): S.DELAYED,
    (S.RUNNING, E.REQUEUE): S.QUEUED,
    (S.RUNNING, E.HOLD): S.HELD,
    (S.RUNNING, E.STOP): S.STOPPING,
    (S.STOPPING, E.CANCEL): S.CANCELLED,
    (S.STOPPING, E.FAIL): S.FAILED,
    (S.STOPPING, E.RETRY): S.DELAYED,
    (S.SUCCEEDED, E.REQUEUE): S.QUEUED,
    (S.FAILED, E.REQUEUE): S.QUEUED,
    (S.CANCELLED, E.REQUEUE): S.QUEUED,
    (S.REJECTED, E.REQUEUE): S.QUEUED,
    (S.SUCCEEDED, E.BLOCK): S.BLOCKED,
    (S.FAILED, E.BLOCK): S.BLOCKED,
    (S.CANCELLED, E.BLOCK): S.BLOCKED,
    (S.REJECTED, E.BLOCK): S.BLOCKED,
}

LIVE = frozenset({S.RUNNING, S.STOPPING})
FINISHED = frozenset({S.SUCCEEDED, S.FAILED, S.CANCELLED, S.REJECTED})
WAITING = frozenset(S) - LIVE - FINISHED


def advance(state: JobState, event: JobEvent) -> JobState:
    """Where the event leads; UserError where it cannot happen in this state."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        can = ", ".join(sorted(at for was, at in TRANSITIONS if was is state)) or "nothing"
        raise UserError(f"a job that is {state} cannot {event}", hint=f"it can: {can}") from None


def can(state: JobState, event: JobEvent) -> bool:
    return (state, event) in TRANSITIONS
