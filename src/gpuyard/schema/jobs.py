"""Answers about jobs: rows, details with their code and progress, why one waits, its history and log; about sweeps,
batches and tasks.
"""

from typing import Literal

from msgspec import Struct

from gpuyard.model.container import Container
from gpuyard.model.dependencies import DependencyKind
from gpuyard.model.energy import EnergyFigures
from gpuyard.model.exported_job import ExportedJob
from gpuyard.model.job import OutcomeKind, SiteRequest, SuspendedBy
from gpuyard.model.job_progress import Figure, FigureCurves
from gpuyard.model.job_spec import OnPreempt, OnReboot, RetryCause
from gpuyard.model.lease import Need
from gpuyard.model.lifecycle import JobState
from gpuyard.model.out_of_memory import ShortageKind
from gpuyard.model.shell_environment import ShellSettings
from gpuyard.model.subscriptions import Event
from gpuyard.policy.wait_reasons import Reason
from gpuyard.schema.queue import GroupProgress, Iso, QueueState, SweepColumn


class JobCode(Struct, frozen=True, kw_only=True):
    """What was recorded of the code when the job was submitted, and what became of it.

    `dirty`: the work tree had changes that were not committed. `script_changed`: the script is another one now.
    `changed_attempts`: those that started with another script than was submitted. `snapshot` is the folder that the
    job runs in, and `snapshot_exists` whether it is still there. None: there is none, or it is not known."""

    root: str | None
    commit: str | None
    dirty: bool | None
    script: str | None
    digest: str | None
    script_changed: bool | None
    changed_attempts: tuple[int, ...]
    snapshot: str | None
    snapshot_exists: bool | None
    text: str | None


class ProgressRow(Struct, frozen=True, kw_only=True):
    """How much of what is done. `percent` is None if the total is unknown. `left_s` is the time that the job still
    needs by its own speed, None if that is not known yet. `at_s` is the run time at which it was read; `told`: by
    `gpuyard.progress` or the file, not from the output."""

    done: float
    total: float | None
    unit: str
    percent: float | None
    left_s: float | None
    at_s: float
    told: bool


class JobSummary(Struct, frozen=True, kw_only=True):
    """What all rows about jobs have; docs/reference/json.md explains each key."""

    id: int
    state: JobState
    outcome: OutcomeKind | None
    status: int | None
    reason: str | None
    error_line: str | None
    devices: tuple[str, ...]
    submitted_at: Iso
    started_at: Iso | None
    ended_at: Iso | None
    log: str | None
    progress: ProgressRow | None
    figures: dict[str, Figure]


class JobRow(JobSummary, frozen=True, kw_only=True):
    """A job in a list. `command` has at most 240 characters there: `is_command_cut` says that the job's own route has
    more."""

    name: str | None
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
    gpu_labels: list[str | None]
    attempt: int
    elapsed_s: float | None
    waited_s: float | None
    due_at: Iso | None
    time_limit_s: float | None
    array: int | None
    index: int | None
    engine: str
    place: str | None
    is_command_cut: bool
    resubmitted_from: int | None
    not_before: Iso | None
    values: dict[str, str]
    varies: tuple[str, ...]
    group: GroupProgress | None


class JobPage(QueueState, frozen=True, kw_only=True):
    """`next` is the `after` of the next page, None on the last one. `total` is None while a submission is being
    stored."""

    jobs: list[JobRow]
    next: int | None
    total: int | None


class MemoryHolder(Struct, frozen=True, kw_only=True):
    who: str
    memory_mb: float | None


class MissingMemory(Struct, frozen=True, kw_only=True):
    """An attempt that ran out of memory. `needed_mb` and `had_mb` concern one device, or RAM: what the attempt held
    plus what it asked for, and what it held plus what was free."""

    where: ShortageKind
    says: str | None
    framework: str | None
    held_mb: float | None
    asked_mb: float | None
    free_mb: float | None
    total_mb: float | None
    needed_mb: float | None
    had_mb: float | None
    others: list[MemoryHolder]


class AttemptRow(Struct, frozen=True, kw_only=True):
    number: int
    pid: int | None
    devices: tuple[str, ...]
    lease: str | None
    started_at: Iso | None
    ended_at: Iso | None
    outcome: OutcomeKind | None
    status: int | None
    reason: str | None
    error_line: str | None
    log: str | None
    error_log: str | None
    reserved_mb: float | None
    predicted_mb: float | None
    peaks_mb: dict[str, float]
    ram_mb: float | None
    cpus_used: float | None
    load_percent: float | None
    cpus: tuple[int, ...]
    energy: EnergyFigures | None
    curve: tuple[tuple[float, float], ...]
    ran_s: float
    warned_at: Iso | None
    parked: SuspendedBy | None
    suspended_at: Iso | None
    suspended_s: float
    lack: MissingMemory | None
    engine: str
    place: str | None
    site_id: str | None
    request: SiteRequest | None
    progress: ProgressRow | None
    figures: dict[str, Figure]
    figure_curves: FigureCurves


class GrownNeed(Struct, frozen=True, kw_only=True):
    """What a job gets after it ran out of memory `count` times."""

    count: int
    memory_mb: float | None
    ram_mb: float | None
    alone: bool


class NextMemory(Struct, frozen=True, kw_only=True):
    """What the next run gets on each GPU, and on which basis."""

    basis: Literal["declared", "learned", "grown", "unknown"]
    given_mb: float | None
    alone: bool
    runs: int | None
    same_command: bool | None


class DependencyRow(Struct, frozen=True, kw_only=True):
    id: int
    kind: DependencyKind
    state: JobState
    met: bool


class NotifyRow(Struct, frozen=True, kw_only=True):
    """`target` is a URL's scheme or a command's first word; None stands for the targets of the configuration."""

    events: tuple[Event, ...]
    target: str | None


class JobDetails(JobRow, frozen=True, kw_only=True):
    """`environment` is None unless its values were asked for: they may be secrets. `dropped` are the variables whose
    values looked secret, and are not kept after the job has ended. `shell` is what the job took from the shell that
    submitted it; None: what the daemon has."""

    cwd: str
    stdin: str | None
    retries: int
    retry_on: tuple[RetryCause, ...]
    retry_delay_s: float | None
    failures: int
    grace_s: float
    signal: str | None
    duration_s: float | None
    on_reboot: OnReboot | None
    log_cap_mb: float
    output: str | None
    error_output: str | None
    split_stderr: bool
    timestamps: bool
    environment_names: list[str]
    environment: dict[str, str] | None
    dropped: tuple[str, ...]
    shell: ShellSettings | None
    need: Need
    preempts: bool
    on_preempt: OnPreempt
    cpus: int | None
    engine_options: tuple[str, ...]
    container: Container | None
    notify: list[NotifyRow]
    growth: GrownNeed | None
    after: list[DependencyRow]
    attempts: list[AttemptRow]
    device_labels: dict[str, str | None]
    memory: NextMemory | None
    energy: EnergyFigures | None
    advice: list[str]
    code: JobCode


class WaitExplanation(Struct, frozen=True, kw_only=True):
    """Why a job does not start or continue, or how it ended. `ahead` is the number of similar jobs before it.
    `is_overdue`: the estimated start has passed."""

    id: int
    state: JobState
    summary: str
    ahead: int | None
    reasons: tuple[Reason, ...]
    device_labels: dict[str, str | None]
    estimated_start: Iso | None
    estimate: str
    is_overdue: bool


class ExportedWorld(Struct, frozen=True, kw_only=True):
    """What the plan about a waiting job follows from: the text of a file for `gpuyard simulate replay`."""

    id: int
    world: str


class HistoryEvent(Struct, frozen=True, kw_only=True):
    id: int
    at: Iso
    kind: str
    text: str | None


class JobHistory(Struct, frozen=True, kw_only=True):
    id: int
    events: list[HistoryEvent]


class LogTail(Struct, frozen=True, kw_only=True):
    """The end of an attempt's log. `is_cut`: there is text before it. `is_over`: nothing more will be written."""

    id: int
    attempt: int | None
    text: str
    is_cut: bool
    is_over: bool


class LogEvent(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event of a followed log: new `text`, the number of the next `attempt`, `cut` where text was skipped because
    the reader fell behind, `over` at the end, or an `error` that ends the stream. `is_stderr`: in a stream of both, the
    text is standard error."""

    text: str | None = None
    is_stderr: bool = False
    attempt: int | None = None
    cut: bool = False
    over: bool = False
    error: str | None = None
    hint: str | None = None


class ExportPage(Struct, frozen=True, kw_only=True):
    jobs: list[ExportedJob]
    next: int | None


class LiveRun(Struct, frozen=True, kw_only=True):
    id: int
    index: str | None


class BatchStatus(Struct, frozen=True, kw_only=True):
    """`gate` is the load gate that holds the next run back, `held_by` the reason, and `device` the GPU it is about.
    `waits_s` is the time that each gate has cost so far; `unknown` names what could not be measured, and `silent` says
    which probe of GPUs did not answer."""

    id: int
    first: int
    last: int
    token: str | None
    count: int
    done: bool
    counts: dict[str, int]
    running: list[LiveRun]
    gate: str | None
    held_by: str | None
    device: str | None
    device_label: str | None
    waits_s: dict[str, float]
    unknown: tuple[str, ...]
    silent: str | None
    now: Iso


class BatchRunRow(JobSummary, frozen=True, kw_only=True):
    index: str | None
    seed: str | None
    is_finished: bool
    is_live: bool
    attempts: int
    seconds: float | None


class BatchRunPage(Struct, frozen=True, kw_only=True):
    runs: list[BatchRunRow]
    next: int | None


class TaskRow(JobSummary, frozen=True, kw_only=True):
    """One task of a workspace: a job that runs one config."""

    config: str
    workspace: str
    is_live: bool
    is_waiting: bool
    is_finished: bool
    attempt: int
    priority: int
    place: str | None
    gpu_labels: list[str | None]
    elapsed_s: float | None
    likely_s: float | None
    memory_mb: float | None
    peak_mb: float | None
    reserved_mb: float | None


class TaskList(Struct, frozen=True, kw_only=True):
    tag: str
    stopped: bool
    paused: bool
    now: Iso
    tasks: list[TaskRow]


class SweepRun(JobRow, frozen=True, kw_only=True):
    """`cells` has a value for each column of the table."""

    cells: list[str | float | None]


class SweepPage(Struct, frozen=True, kw_only=True):
    """`command` has its placeholders; `total` counts the runs on all pages, and `next` is the `after` of the next page,
    None on the last one."""

    id: int
    name: str | None
    tag: str | None
    command: str
    submitted_at: Iso
    varies: tuple[str, ...]
    progress: GroupProgress
    columns: list[SweepColumn]
    jobs: list[SweepRun]
    next: int | None
    total: int
