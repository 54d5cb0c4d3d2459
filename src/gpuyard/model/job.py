"""Jobs as values: a Job is the current state of one, an Attempt is one run of it. Jobs of one submission share one
spec; they differ in their `index` in an array, in the `values` of their placeholders, or in a whole `command` of their
own.
"""

from enum import StrEnum

from msgspec import Struct

from gpuyard.model.energy import EnergyUse
from gpuyard.model.job_progress import JobProgress
from gpuyard.model.job_spec import UNREADABLE, JobSpec
from gpuyard.model.lifecycle import JobState
from gpuyard.model.out_of_memory import Shortage
from gpuyard.model.placeholders import fill_in


class SuspendedBy(StrEnum):
    """Why a job is suspended: a person asked for it, and has to resume it; or it was preempted, or its GPU was about to
    run out of memory, and it continues when there is enough free memory; or its site did, and resumes it."""

    BY_PERSON = "by-person"
    FOR_ROOM = "for-room"
    MEMORY_GUARD = "memory-guard"
    BY_SITE = "by-site"


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
    MEMORY_GUARD = "memory-guard"
    DEVICE_FAULT = "device-fault"
    HOST_GUARD = "host-guard"


class Outcome(Struct, frozen=True, kw_only=True):
    """How an attempt ended. `status` is the program's exit status, 128 + N for signal N; None if unknown.
    `error_line` is the line of its output that says why it failed (`error_line.py`), which `reason` begins with."""

    kind: OutcomeKind
    status: int | None = None
    reason: str | None = None
    error_line: str | None = None


class Growth(Struct, frozen=True, kw_only=True):
    """What a job gets after it ran out of memory `count` times: more device memory, more RAM, or a device alone."""

    count: int = 0
    memory_mb: float | None = None
    ram_mb: float | None = None
    is_alone: bool = False


class Job(Struct, frozen=True, kw_only=True):
    id: int
    spec: JobSpec
    state: JobState
    priority: int
    user: str
    submitted_at: float
    queued_at: float | None = None
    group: int | None = None  # the first job id of the array
    group_limit: int | None = None
    index: int | None = None
    values: dict[str, str] = {}
    command: tuple[str, ...] | None = None
    attempts: int = 0
    failures: int = 0  # number of attempts that used up a retry
    due_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    outcome: Outcome | None = None
    reason: str | None = None
    growth: Growth = Growth()
    not_before: float | None = None  # the earliest start that the user asked for

    @property
    def is_unreadable(self) -> bool:
        """Whether its command was lost from the queue's database: it never starts."""
        return (self.command or self.spec.command) == UNREADABLE

    @property
    def argv(self) -> tuple[str, ...]:
        """The command with its placeholders filled in. Braces that name no placeholder stay as they are."""
        command = self.command if self.command is not None else self.spec.command
        if not any("{" in word for word in command):
            return command
        values = self.placeholders
        return fill_in(command, values) if values else command

    @property
    def placeholders(self) -> dict[str, str]:
        """The values of its placeholders: those of a sweep or a table, and its index."""
        return self.values if self.index is None else {**self.values, "index": str(self.index)}


class Usage(Struct, frozen=True, kw_only=True):
    """What an attempt was measured to use."""

    peaks_mb: dict[str, float] = {}  # peak memory on each device
    ram_mb: float | None = None  # peak RAM of all its processes together
    cpus_used: float | None = None  # how many CPUs all its processes together kept busy: CPU time by run time
    load_percent: float | None = None  # how busy it kept its devices by itself, as the mean of `load_s` seconds
    load_s: float = 0.0
    load_now: float | None = None  # since `load_at_s`
    load_at_s: float = 0.0
    curve: tuple[tuple[float, float], ...] = ()  # device memory over time, as pairs of seconds and MB
    grew_at_s: float = 0.0  # when its device memory last grew, to `levels_mb`
    levels_mb: dict[str, float] = {}
    flat_levels_mb: tuple[float, ...] = ()  # its peak when its memory had first been flat for each time of FLAT_S
    idle_looks: int = 0  # number of samples in which no process at all was on its devices
    preallocates: str = ""  # the framework that took most of its devices at once, which says nothing about its need
    saw_foreign: bool = False  # memory was in use on its devices that belongs to no job of this queue
    energy: EnergyUse | None = None  # of its devices, as far as it was measured
    progress: JobProgress | None = None  # what its output or its progress file says

    @property
    def peak_mb(self) -> float | None:
        """Peak memory on a single device."""
        return max(self.peaks_mb.values(), default=None)


class MemoryLack(Struct, frozen=True, kw_only=True):
    """What memory an attempt lacked when it ran out, and which others held how much at that moment."""

    shortage: Shortage
    others: tuple[tuple[str, float | None], ...] = ()


class SiteRequest(Struct, frozen=True, kw_only=True):
    """What an engine that places work itself was sent for an attempt, and where the figures in it come from."""

    text: str
    origins: dict[str, str] = {}


class HandedOver(Struct, frozen=True, kw_only=True, tag="handed-over"):
    """An engine, or the keeper with others that run before it, got the attempt `at` this time. It has not started."""

    at: float


class Started(Struct, frozen=True, kw_only=True, tag="started"):
    """The attempt runs."""

    at: float  # when it was recorded, right before its keeper got it; on another machine, when it started there
    keeper_pid: int = 0  # process that is the parent of the program; 0 on another machine
    pid: int | None = None  # the program, once known
    place: str | None = None  # where its engine runs it; None on this machine


class Over(Struct, frozen=True, kw_only=True, tag="over"):
    """The attempt ended `at` this time. `before` is the phase in which it ended: HandedOver if it never started."""

    before: HandedOver | Started
    at: float
    outcome: Outcome
    lack: MemoryLack | None = None


class Attempt(Struct, frozen=True, kw_only=True):
    """One run of a job. It is live from the moment it is recorded until its phase is Over."""

    job_id: int
    number: int
    phase: HandedOver | Started | Over
    boot_id: str | None = None  # boot of this machine in which it was recorded; None if it runs on another machine
    lease_id: str | None = None
    devices: tuple[str, ...] = ()
    log: str | None = None  # file of its output
    error_log: str | None = None  # file of its standard error, if that is another one
    stop_at: float | None = None  # when it is asked to stop
    kill_at: float | None = None  # when it is killed
    warned_at: float | None = None  # when it got the signal before its stop
    stopping: OutcomeKind | None = None  # its outcome once it has stopped
    reserved_mb: float | None = None  # memory reserved on each device
    predicted_mb: float | None = None  # what it was estimated to need
    parked: SuspendedBy | None = None  # why it is suspended
    suspended_at: float | None = None  # since when it is suspended
    suspended_s: float = 0.0  # how long it was suspended before
    usage: Usage | None = None
    cpus: tuple[int, ...] = ()  # the CPUs that it may run on; empty: any
    engine: str = ""  # set if an engine places it, which calls it `site_id`
    site_id: str | None = None
    request: SiteRequest | None = None  # what that engine was sent

    @property
    def key(self) -> str:
        """Name of the attempt in the keeper's journal."""
        return f"{self.job_id}.{self.number}"

    @property
    def last_live_phase(self) -> HandedOver | Started:
        phase = self.phase
        return phase.before if isinstance(phase, Over) else phase

    @property
    def started(self) -> Started | None:
        """Where and since when it runs or ran; None if it has not started."""
        phase = self.last_live_phase
        return phase if isinstance(phase, Started) else None

    @property
    def over(self) -> Over | None:
        return self.phase if isinstance(self.phase, Over) else None

    @property
    def awaits_turn(self) -> bool:
        """Whether it starts on this machine when others of its slice have ended."""
        return isinstance(self.phase, HandedOver) and not self.engine

    @property
    def since(self) -> float:
        """When it started or, if it has not, when it was handed over."""
        return self.last_live_phase.at

    @property
    def started_at(self) -> float | None:
        return None if self.started is None else self.started.at

    @property
    def keeper_pid(self) -> int:
        return 0 if self.started is None else self.started.keeper_pid

    @property
    def pid(self) -> int | None:
        return None if self.started is None else self.started.pid

    @property
    def place(self) -> str | None:
        return None if self.started is None else self.started.place

    @property
    def outcome(self) -> Outcome | None:
        return None if self.over is None else self.over.outcome

    @property
    def ended_at(self) -> float | None:
        return None if self.over is None else self.over.at

    @property
    def lack(self) -> MemoryLack | None:
        return None if self.over is None else self.over.lack

    def ran_s(self, now: float) -> float:
        """Return how long it has run until `now`, without the time in which it was suspended."""
        paused = self.suspended_s + (now - self.suspended_at if self.suspended_at is not None else 0.0)
        return 0.0 if self.started is None else max(0.0, now - self.started.at - paused)


class PublishedEventKind(StrEnum):
    STARTED = "started"
    ENDED = "ended"  # an attempt: its job may run again
    FINISHED = "finished"  # a job: it will not run again
    MADE_WAY = "made-way"  # a job that the memory guard suspends or stops


class PublishedEvent(Struct, frozen=True, kw_only=True):
    """What the controller publishes after a step, with the job after the event and its last attempt. Jobs that were
    cancelled together are one event, with the first; `text` says what the memory guard saw."""

    kind: PublishedEventKind
    job: Job
    at: float
    attempt: Attempt | None = None
    jobs: int = 1
    text: str = ""

    @property
    def outcome(self) -> Outcome | None:
        return None if self.attempt is None else self.attempt.outcome
