"""Jobs in words: a JobSpec is what the user said, a Job is how it stands, an Attempt is one run of it.

Jobs that were submitted together share one spec; what differs between them is their `index` in an array, the `values`
of their placeholders, or a whole `command` of their own.
"""

import re
from enum import StrEnum

from msgspec import Struct

from gpuyard.core.lifecycle import JobState
from gpuyard.core.model import Need

DEFAULT_GRACE_S = 10.0
DEFAULT_LOG_CAP_MB = 256.0
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


class OnReboot(StrEnum):
    REQUEUE = "requeue"
    HOLD = "hold"
    FAIL = "fail"


class DependencyKind(StrEnum):
    """When a dependency is met: the other job succeeded, ended in any way, or failed."""

    OK = "ok"
    ANY = "any"
    FAILED = "failed"


class Dependency(Struct, frozen=True, kw_only=True):
    job_id: int
    kind: DependencyKind = DependencyKind.OK


class OutcomeKind(StrEnum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANNOT_START = "cannot-start"
    OUT_OF_MEMORY = "out-of-memory"
    TIMED_OUT = "timed-out"
    CANCELLED = "cancelled"
    LOST = "lost"
    UNBEGUN = "unbegun"


class Outcome(Struct, frozen=True, kw_only=True):
    """How an attempt ended. `status` is the program's own, 128 and more for a signal; unknown where nobody saw it."""

    kind: OutcomeKind
    status: int | None = None
    reason: str | None = None


class JobSpec(Struct, frozen=True, kw_only=True):
    """What the user said. Its environment may hold secrets: it is in no log and no `repr`."""

    command: tuple[str, ...]
    cwd: str
    environment: dict[str, str]
    need: Need
    name: str | None = None
    tag: str = ""
    retries: int = 0
    time_limit_s: float | None = None
    grace_s: float = DEFAULT_GRACE_S
    duration_s: float | None = None
    on_reboot: OnReboot | None = None
    stdin: str | None = None
    log_cap_mb: float = DEFAULT_LOG_CAP_MB
    is_array: bool = False

    def __repr__(self) -> str:
        return f"JobSpec({self.name or ' '.join(self.command)!r})"


class Job(Struct, frozen=True, kw_only=True):
    """`failures` are the attempts that count against the spec's retries; `group` is the array's first id."""

    id: int
    spec: JobSpec
    state: JobState
    priority: int
    user: str
    submitted_at: float
    queued_at: float | None = None
    group: int | None = None
    group_limit: int | None = None
    index: int | None = None
    values: dict[str, str] = {}
    command: tuple[str, ...] | None = None
    attempts: int = 0
    failures: int = 0
    due_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    outcome: Outcome | None = None
    reason: str | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """The command with its placeholders filled in; braces that name none of them stay as they are."""
        filled = dict(self.values)
        if self.index is not None:
            filled["index"] = str(self.index)
        words = self.command if self.command is not None else self.spec.command
        if not filled:
            return words
        # All in one pass: a value that looks like a placeholder is a value all the same.
        return tuple(_PLACEHOLDER.sub(lambda found: filled.get(found[1], found[0]), word) for word in words)


class Attempt(Struct, frozen=True, kw_only=True):
    """One run. It lives from the moment it is recorded until its outcome is known.

    While it lives, `pid` is that of its keeper; afterwards it is the program's own.
    It is asked to stop at `stop_at` and made to at `kill_at`; `stopping` is what that will have been.
    """

    job_id: int
    number: int
    pid: int
    boot_id: str | None
    started_at: float
    lease_id: str | None = None
    devices: tuple[str, ...] = ()
    log: str | None = None
    stop_at: float | None = None
    kill_at: float | None = None
    stopping: OutcomeKind | None = None
    ended_at: float | None = None
    outcome: Outcome | None = None

    @property
    def key(self) -> str:
        """As the engine's journal calls it."""
        return f"{self.job_id}.{self.number}"
