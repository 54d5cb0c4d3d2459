"""The life of a job as one table: in which state what may happen, and what it leads to.

- `held` waits for a person, `blocked` for other jobs, `delayed` for a time, `queued` for devices.
- A job has a live attempt exactly while it is `pending` with an engine that will place it, `running`, `stopping`, or on
  the way to being `suspended` and back.
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
    PENDING = "pending"
    RUNNING = "running"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    RESUMING = "resuming"
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
    HAND_OVER = "hand-over"
    BEGIN = "begin"
    SUSPEND = "suspend"
    PARK = "park"
    RESUME = "resume"
    GO_ON = "go-on"
    STOP = "stop"
    SUCCEED = "succeed"
    FAIL = "fail"
    CANCEL = "cancel"
    RETRY = "retry"
    REQUEUE = "requeue"
    REJECT = "reject"


S, E = JobState, JobEvent

# Whoever has a live attempt may find that it has ended, or be told to end it.
_ENDS: dict[JobEvent, JobState] = {
    E.SUCCEED: S.SUCCEEDED,
    E.FAIL: S.FAILED,
    E.RETRY: S.DELAYED,
    E.REQUEUE: S.QUEUED,
    E.HOLD: S.HELD,
    E.STOP: S.STOPPING,
}

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
    (S.QUEUED, E.HAND_OVER): S.PENDING,
    (S.QUEUED, E.HOLD): S.HELD,
    (S.QUEUED, E.CANCEL): S.CANCELLED,
    (S.QUEUED, E.REJECT): S.REJECTED,
    **{
        (state, event): after
        for state in (S.PENDING, S.RUNNING, S.SUSPENDING, S.SUSPENDED, S.RESUMING)
        for event, after in _ENDS.items()
    },
    (S.PENDING, E.BEGIN): S.RUNNING,
    (S.RUNNING, E.SUSPEND): S.SUSPENDING,
    (S.SUSPENDING, E.PARK): S.SUSPENDED,
    (S.SUSPENDING, E.GO_ON): S.RUNNING,
    (S.SUSPENDED, E.RESUME): S.RESUMING,
    (S.RESUMING, E.GO_ON): S.RUNNING,
    (S.RESUMING, E.PARK): S.SUSPENDED,
    (S.STOPPING, E.CANCEL): S.CANCELLED,
    (S.STOPPING, E.SUCCEED): S.SUCCEEDED,
    (S.STOPPING, E.FAIL): S.FAILED,
    (S.STOPPING, E.RETRY): S.DELAYED,
    (S.STOPPING, E.REQUEUE): S.QUEUED,
    (S.SUCCEEDED, E.REQUEUE): S.QUEUED,
    (S.FAILED, E.REQUEUE): S.QUEUED,
    (S.CANCELLED, E.REQUEUE): S.QUEUED,
    (S.REJECTED, E.REQUEUE): S.QUEUED,
    (S.SUCCEEDED, E.BLOCK): S.BLOCKED,
    (S.FAILED, E.BLOCK): S.BLOCKED,
    (S.CANCELLED, E.BLOCK): S.BLOCKED,
    (S.REJECTED, E.BLOCK): S.BLOCKED,
}

# Suspended, or on the way there or back: such a job does not run, whatever its attempt holds.
PARKED = frozenset({S.SUSPENDING, S.SUSPENDED, S.RESUMING})
LIVE = PARKED | {S.PENDING, S.RUNNING, S.STOPPING}
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
