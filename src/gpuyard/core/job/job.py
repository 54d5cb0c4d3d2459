"""Jobs in words: a JobSpec is what the user said, a Job is how it stands, an Attempt is one run of it.

Jobs that were submitted together share one spec; what differs between them is their `index` in an array, the `values`
of their placeholders, or a whole `command` of their own.
"""

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum

from msgspec import Struct

from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.job.workspace_task import Task
from gpuyard.core.lease import Need
from gpuyard.core.memory.out_of_memory import Shortage
from gpuyard.core.notify.subscriptions import Subscription
from gpuyard.core.scheduling.batch_pacing import BatchPace
from gpuyard.core.scheduling.tag_sharing import TagSharing

DEFAULT_GRACE_S = 10.0
DEFAULT_LOG_CAP_MB = 256.0
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


class OnReboot(StrEnum):
    REQUEUE = "requeue"
    HOLD = "hold"
    FAIL = "fail"


class OnPreempt(StrEnum):
    """What an urgent job may do to it: move its memory out of the way (or, where that cannot be, as the next), stop it
    and queue it again, nothing."""

    SUSPEND = "suspend"
    REQUEUE = "requeue"
    NEVER = "never"


class SuspendedBy(StrEnum):
    """Why a job is suspended: a person said so, and it stays until one says otherwise; or it waits for room."""

    BY_PERSON = "by-person"
    FOR_ROOM = "for-room"


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
    NEVER_STARTED = "never-started"
    PREEMPTED = "preempted"
    NOT_RESTORED = "not-restored"


class Outcome(Struct, frozen=True, kw_only=True):
    """How an attempt ended. `status` is the program's own, 128 and more for a signal; unknown where nobody saw it."""

    kind: OutcomeKind
    status: int | None = None
    reason: str | None = None


class JobSpec(Struct, frozen=True, kw_only=True):
    """What the user said. Its environment may hold secrets: it is in no log and no `repr`.

    One that `learns_memory` has left open how much it needs; `configuration` is a digest of the files it names; the
    runs of a batch start at its `pace`. One that `sees_all_devices` has none of its own, as no probe could name
    any, and is kept from none that may be there. Jobs of its tag are its `crew`, and a workspace's are its `task`s.
    Where there is an `engine`, that places it, with these options of its own. Who is told of it
    (`notify`) may hold secrets as well.
    """

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
    learns_memory: bool = False
    configuration: str = ""
    preempts: bool = False
    on_preempt: OnPreempt = OnPreempt.SUSPEND
    pace: BatchPace | None = None
    sees_all_devices: bool = False
    crew: TagSharing | None = None
    task: Task | None = None
    engine: str = ""
    engine_options: tuple[str, ...] = ()
    cpus: int | None = None
    notify: tuple[Subscription, ...] = ()

    def __repr__(self) -> str:
        return f"JobSpec({self.name or ' '.join(self.command)!r})"


class Growth(Struct, frozen=True, kw_only=True):
    """What a job is given that ran out of memory so often: so much of a device or of RAM, or a device alone."""

    count: int = 0
    memory_mb: float | None = None
    ram_mb: float | None = None
    is_alone: bool = False


def fill_in(words: Sequence[str], values: Mapping[str, str]) -> tuple[str, ...]:
    """In one pass: a value that looks like a placeholder is a value all the same."""
    return tuple(
        _PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), word) if "{" in word else word for word in words
    )


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
    growth: Growth = Growth()

    @property
    def words(self) -> tuple[str, ...]:
        """The command with its placeholders filled in; braces that name none of them stay as they are."""
        filled = dict(self.values)
        if self.index is not None:
            filled["index"] = str(self.index)
        words = self.command if self.command is not None else self.spec.command
        return fill_in(words, filled) if filled else words


class Usage(Struct, frozen=True, kw_only=True):
    """What an attempt was seen to use: the most on each device, of RAM over all its processes, how busy it kept its
    devices while it had them to itself, and its memory over time as pairs of seconds and MB. Its last growth, at
    `grew_at_s`, was to `levels_mb`. At `idle_looks` nobody at all was on its devices."""

    peaks_mb: dict[str, float] = {}
    ram_mb: float | None = None
    load_percent: float | None = None
    load_looks: int = 0
    curve: tuple[tuple[float, float], ...] = ()
    grew_at_s: float = 0.0
    levels_mb: dict[str, float] = {}
    idle_looks: int = 0

    @property
    def peak_mb(self) -> float | None:
        """The most on one device."""
        return max(self.peaks_mb.values(), default=None)


class MemoryLack(Struct, frozen=True, kw_only=True):
    """What an attempt that ran out of memory lacked, and who held how much of the rest at that moment."""

    shortage: Shortage
    others: tuple[tuple[str, float | None], ...] = ()


class Attempt(Struct, frozen=True, kw_only=True):
    """One run. It lives from the moment it is recorded until its outcome is known.

    While it lives, `pid` is that of its keeper; afterwards it is the program's own.
    It is asked to stop at `stop_at` and made to at `kill_at`; `stopping` is what that will have been.
    `reserved_mb` is what it was given on each device, and `predicted_mb` what it was thought to need. Suspended since
    `suspended_at`, and for `suspended_s` before that. One that an `engine` places is `site_id` to that, and runs at a
    `place` once it has begun; until then it has not `started_at` all, and is only handed over.
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
    reserved_mb: float | None = None
    predicted_mb: float | None = None
    parked: SuspendedBy | None = None
    suspended_at: float | None = None
    suspended_s: float = 0.0
    usage: Usage | None = None
    lack: MemoryLack | None = None
    engine: str = ""
    place: str | None = None
    site_id: str | None = None

    @property
    def has_started(self) -> bool:
        return not self.engine or self.place is not None

    @property
    def key(self) -> str:
        """As the engine's journal calls it."""
        return f"{self.job_id}.{self.number}"

    def ran_s(self, now: float) -> float:
        """How long it has run, or ran until then, without the time in which it was suspended."""
        if not self.has_started:
            return 0.0
        paused = self.suspended_s + (now - self.suspended_at if self.suspended_at is not None else 0.0)
        return max(0.0, now - self.started_at - paused)
