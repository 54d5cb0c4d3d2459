"""Jobs: in a list, one with all there is to say, why it waits, what happened to it, what it wrote."""

from typing import Literal, TypedDict

from gpuyard.core.cluster.export import ExportedJob
from gpuyard.core.job.job import DependencyKind, OnPreempt, OnReboot, OutcomeKind, SuspendedBy
from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.lease import Need
from gpuyard.core.memory.out_of_memory import ShortageKind
from gpuyard.core.notify.subscriptions import Event
from gpuyard.core.scheduling.wait_reasons import Reason
from gpuyard.daemon.schema.queue_answers import Iso, Standing


class JobRow(TypedDict):
    id: int
    name: str | None
    state: JobState
    tag: str | None
    priority: int
    user: str
    command: str
    gpus: int
    vram_mb: float | None
    exclusive: bool
    learns_memory: bool
    reserved_mb: float | None
    estimated_mb: float | None
    devices: list[str]
    gpu_indexes: list[int | None]
    attempt: int
    submitted_at: Iso
    started_at: Iso | None
    ended_at: Iso | None
    elapsed_s: float | None
    waited_s: float | None
    time_limit_s: float | None
    status: int | None
    outcome: OutcomeKind | None
    reason: str | None
    array: int | None
    index: int | None
    log: str | None
    engine: str
    place: str | None


class JobPage(Standing):
    jobs: list[JobRow]
    next: int | None
    total: int | None


class Other(TypedDict):
    who: str
    memory_mb: float | None


class LackOfMemory(TypedDict):
    where: ShortageKind
    says: str | None
    framework: str | None
    held_mb: float | None
    asked_mb: float | None
    free_mb: float | None
    total_mb: float | None
    needed_mb: float | None
    had_mb: float | None
    others: list[Other]


class AttemptRow(TypedDict):
    number: int
    pid: int | None
    devices: list[str]
    lease: str | None
    started_at: Iso | None
    ended_at: Iso | None
    outcome: OutcomeKind | None
    status: int | None
    reason: str | None
    log: str | None
    reserved_mb: float | None
    predicted_mb: float | None
    peaks_mb: dict[str, float]
    ram_mb: float | None
    load_percent: float | None
    curve: list[tuple[float, float]]
    ran_s: float
    parked: SuspendedBy | None
    suspended_at: Iso | None
    suspended_s: float
    lack: LackOfMemory | None
    engine: str
    place: str | None
    site_id: str | None


class GrownNeed(TypedDict):
    count: int
    memory_mb: float | None
    ram_mb: float | None
    alone: bool


class MemoryGiven(TypedDict):
    basis: Literal["declared", "learned", "grown", "unknown"]
    given_mb: float | None
    alone: bool
    runs: int | None
    same_command: bool | None


class AfterJob(TypedDict):
    id: int
    kind: DependencyKind
    state: JobState
    met: bool


class Told(TypedDict):
    events: list[Event]
    target: str | None


class Wish(TypedDict):
    """Who is told of it, and of what; without a target, those that the configuration names."""

    events: list[str]
    target: str | None


class JobInFull(JobRow):
    cwd: str
    stdin: str | None
    retries: int
    failures: int
    grace_s: float
    duration_s: float | None
    on_reboot: OnReboot | None
    log_cap_mb: float
    values: dict[str, str]
    environment_names: list[str]
    environment: dict[str, str] | None
    need: Need
    preempts: bool
    on_preempt: OnPreempt
    cpus: int | None
    engine_options: list[str]
    notify: list[Told]
    growth: GrownNeed | None
    after: list[AfterJob]
    attempts: list[AttemptRow]
    memory: MemoryGiven | None
    advice: list[str]


class Why(TypedDict):
    id: int
    state: JobState
    summary: str
    ahead: int | None
    reasons: list[Reason]
    estimated_start: Iso | None
    estimate: str


class StoryEvent(TypedDict):
    id: int
    at: Iso
    kind: str
    text: str | None


class Story(TypedDict):
    id: int
    events: list[StoryEvent]


class Log(TypedDict):
    id: int
    attempt: int | None
    text: str
    is_cut: bool
    is_over: bool


class Export(TypedDict):
    jobs: list[ExportedJob]
    next: int | None
