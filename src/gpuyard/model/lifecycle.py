"""The lifecycle of a job as one table: which events each state allows, and which state follows.

- `held` waits for a person, `blocked` for other jobs, `delayed` for a time, `queued` for devices.
- A job has a live attempt exactly while it is in a state of LIVE; `pending`: handed over to an engine that places it.
- A finished job runs again only when a person asks for it.
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
    DELAY = "delay"
    START = "start"
    HAND_OVER = "hand-over"
    SUSPEND = "suspend"
    MOVED_OUT = "moved-out"
    RESUME = "resume"
    CONTINUE = "continue"
    STOP = "stop"
    SUCCEED = "succeed"
    FAIL = "fail"
    CANCEL = "cancel"
    RETRY = "retry"
    REQUEUE = "requeue"
    REJECT = "reject"


S, E = JobState, JobEvent

# A live attempt may end, or be asked to stop, in any of its states.
_ENDS: dict[JobEvent, JobState] = {
    E.SUCCEED: S.SUCCEEDED,
    E.FAIL: S.FAILED,
    E.RETRY: S.DELAYED,
    E.REQUEUE: S.QUEUED,
    E.HOLD: S.HELD,
    E.STOP: S.STOPPING,
}

_FINISHED = (S.SUCCEEDED, S.FAILED, S.CANCELLED, S.REJECTED)

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
    (S.QUEUED, E.DELAY): S.DELAYED,
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
    (S.PENDING, E.START): S.RUNNING,
    (S.RUNNING, E.SUSPEND): S.SUSPENDING,
    (S.SUSPENDING, E.MOVED_OUT): S.SUSPENDED,
    (S.SUSPENDING, E.CONTINUE): S.RUNNING,
    (S.SUSPENDED, E.RESUME): S.RESUMING,
    (S.RESUMING, E.CONTINUE): S.RUNNING,
    (S.RESUMING, E.MOVED_OUT): S.SUSPENDED,
    (S.STOPPING, E.CANCEL): S.CANCELLED,
    (S.STOPPING, E.SUCCEED): S.SUCCEEDED,
    (S.STOPPING, E.FAIL): S.FAILED,
    (S.STOPPING, E.RETRY): S.DELAYED,
    (S.STOPPING, E.REQUEUE): S.QUEUED,
    **{(state, E.REQUEUE): S.QUEUED for state in _FINISHED},
    **{(state, E.BLOCK): S.BLOCKED for state in _FINISHED},
}

# The program of such a job does not run, although its attempt is live and may still hold device memory.
IN_SUSPENSION = frozenset({S.SUSPENDING, S.SUSPENDED, S.RESUMING})
LIVE = IN_SUSPENSION | {S.PENDING, S.RUNNING, S.STOPPING}
FINISHED = frozenset(_FINISHED)
WAITING = frozenset(S) - LIVE - FINISHED


def advance(state: JobState, event: JobEvent) -> JobState:
    """Return the state that follows the event. Raises UserError if this state does not allow the event."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        allowed = ", ".join(sorted(each for before, each in TRANSITIONS if before is state))
        raise UserError(f"a {state} job does not allow '{event}'", hint=f"allowed: {allowed}") from None


def can(state: JobState, event: JobEvent) -> bool:
    return (state, event) in TRANSITIONS
