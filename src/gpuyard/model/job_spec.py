"""What a user submits: a JobSpec, which all jobs of one submission share, with the code that they run and, for a task
of a workspace, its settings. The engine that starts a task takes care of its session, logs and marker.
"""

import posixpath
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from gpuyard.model.container import Container
from gpuyard.model.lease import Need, UnknownMemory
from gpuyard.model.shell_environment import ShellSettings
from gpuyard.model.subscriptions import Subscription


class CodeSnapshot(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Copies of the files of the tree at `root`, in `folder`. `cwd` is the place there in which jobs start."""

    name: str
    folder: str
    root: str
    cwd: str

    def inside(self, path: str) -> str | None:
        """Return where a path of the tree is in the snapshot; None for a path outside the tree."""
        path = posixpath.normpath(path)
        if path == self.root:
            return self.folder
        prefix = self.root if self.root.endswith("/") else f"{self.root}/"
        return f"{self.folder}/{path.removeprefix(prefix)}" if path.startswith(prefix) else None


class CodeRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was recorded at submission: the Git work tree of the working directory, the commit that was checked out
    there, the absolute path of the `script` that the command runs, and the digest of its content; None if unknown."""

    root: str | None = None
    commit: str | None = None
    script: str | None = None
    digest: str | None = None
    snapshot: CodeSnapshot | None = None


def commit_text(commit: str | None, *, is_dirty: bool | None) -> str | None:
    """Return `commit 1a2b3c4d5e, with uncommitted changes`; None without a commit."""
    if commit is None:
        return None
    return f"commit {commit[:10]}{', with uncommitted changes' if is_dirty else ''}"


def changed_script_text(
    script: str, *, is_changed: bool | None, attempts: tuple[int, ...], is_over: bool
) -> str | None:
    """Return what to say about a script that has changed. `attempts` started with a changed one."""
    text = f"the script {posixpath.basename(script)} has changed since it was submitted"
    if attempts:
        return f"{text}: attempt{'s' * (len(attempts) > 1)} {', '.join(map(str, attempts))} ran the changed one"
    return (text if is_over else f"{text}; the next attempt runs it as it is then") if is_changed else None


GPU = "{gpu}"


class Task(Struct, frozen=True, kw_only=True):
    """Settings of a task. All paths are absolute."""

    workspace: str
    config: str
    owner: str  # marks the session as ours
    marker: str
    record: str  # file in which the engine records how the task ended
    session: str | None = None  # tmux session name with the placeholder {gpu}
    closes_session: bool = False
    log: str | None = None  # output of the program
    other_log: str | None = None  # in place of `log`, if another workspace that shares the folder uses that
    scheduler_log: str | None = None  # what the scheduler does with the task
    variable: str | None = None  # environment variable that names the devices, in place of CUDA_VISIBLE_DEVICES
    check_s: float = 30.0  # the engine looks for the marker so often, and
    grace_s: float = 60.0  # ends a program that still runs so long after it
    delay_s: float = 0.5  # between opening the session and starting the program
    hook: tuple[str, ...] = ()  # runs before and after the program
    hook_timeout_s: float = 60.0


def place_of(labels: Sequence[str | None]) -> str:
    """Return where a task runs, as its session name shows it: `gpu0_1`, `gpu-amd-0` (tmux takes no colon), or `cpu`."""
    if not labels:
        return "cpu"
    places = "_".join((label or "x").replace(":", "-") for label in labels)
    return f"gpu{places}" if places[0] in "x0123456789" else f"gpu-{places}"


def session_on(task: Task, place: str) -> str | None:
    """Return the session name of a task that runs at `place`, or None."""
    return None if task.session is None else task.session.replace(GPU, place)


DEFAULT_GRACE_S = 10.0
DEFAULT_LOG_CAP_MB = 256.0
# In place of a command that could not be read from the queue's database.
UNREADABLE = ("(cannot be read)",)


class OnReboot(StrEnum):
    REQUEUE = "requeue"
    HOLD = "hold"
    FAIL = "fail"


class OnPreempt(StrEnum):
    """What an urgent job may do to this job: suspend it (or requeue it if that fails), requeue it, or nothing."""

    SUSPEND = "suspend"
    REQUEUE = "requeue"
    NEVER = "never"


class RetryCause(StrEnum):
    """What a job may be retried after. A failure that the GPU caused is both `device` and `failed`."""

    FAILED = "failed"
    TIMEOUT = "timeout"
    OOM = "oom"
    DEVICE = "device"


class StopWarning(Struct, frozen=True, kw_only=True):
    """A signal that a program gets `lead_s` before it is stopped (`stopping.py`)."""

    signum: int
    lead_s: float


class BatchPace(Struct, frozen=True, kw_only=True):
    """The limits of a batch. A limit that is None does not apply."""

    max_cpu_percent: float | None = None
    min_free_memory_mb: float | None = None
    max_gpu_percent: float | None = None
    max_gpu_memory_mb: float | None = None
    run_ram_mb: float | None = None  # the RAM of one run; learned where it is None
    smoothing_s: float = 5.0
    steady_s: float = 3.0
    stagger_s: float = 0.0  # the least time between two starts
    sample_log: str | None = None  # a file for the figures

    @property
    def gates_devices(self) -> bool:
        return self.max_gpu_percent is not None or self.max_gpu_memory_mb is not None


class TagSharing(Struct, frozen=True, kw_only=True):
    """How jobs of one tag share devices: how many run on one device, and the least time between two starts."""

    most_per_device: Annotated[int, Meta(ge=1)]
    stagger_s: Annotated[float, Meta(ge=0)] = 0.0


class DiskLimits(Struct, frozen=True, kw_only=True):
    """`min_free_mb`: 0 for no limit, None as configured. `output_root` is the folder of all runs of a batch."""

    min_free_mb: float | None = None
    output_root: str | None = None


class JobSpec(Struct, frozen=True, kw_only=True):
    """What the user submitted. `environment` and `notify` may hold secrets: they are in no log and no `repr`. `secrets`
    are the variables that look secret. After its jobs have ended they are `dropped` from `environment`."""

    command: tuple[str, ...]
    cwd: str
    environment: dict[str, str]
    need: Need
    name: str | None = None
    tag: str = ""
    retries: int = 0
    retry_on: tuple[RetryCause, ...] = tuple(RetryCause)
    retry_delay_s: float | None = None  # before the first retry; None: by the outcome
    time_limit_s: float | None = None
    grace_s: float = DEFAULT_GRACE_S
    warning: StopWarning | None = None
    duration_s: float | None = None
    on_reboot: OnReboot | None = None
    stdin: str | None = None
    log_cap_mb: float = DEFAULT_LOG_CAP_MB
    is_array: bool = False
    configuration: str = ""  # digest of the files that the command names
    framework: str = ""  # the framework that its script imports
    preempts: bool = False
    on_preempt: OnPreempt = OnPreempt.SUSPEND
    pace: BatchPace | None = None  # how fast the runs of a batch start
    sees_all_devices: bool = False  # no probe found a device, so none is leased and none is hidden from the program
    tag_sharing: TagSharing | None = None  # how jobs of the same tag share devices
    task: Task | None = None  # set for a task of a workspace
    engine: str = ""  # engine that places the job, with `engine_options`; empty for this machine
    engine_options: tuple[str, ...] = ()
    cpus: int | None = None
    notify: tuple[Subscription, ...] = ()
    output: str | None = None  # pattern of the file for standard output, see `placeholders`; None for the queue's log
    error: str | None = None  # pattern of the file for standard error; None for the same file as standard output
    disk: DiskLimits = DiskLimits()  # how much free space it starts with
    split_stderr: bool = False  # standard error gets a log of its own
    timestamps: bool = False  # each line begins with the time
    container: Container | None = None  # set for a program that runs in a container
    secrets: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    shell: ShellSettings | None = None  # of the shell that submitted it; None: as the daemon
    stagger_s: float = 0.0  # the least time between two starts of its array
    resubmitted_from: int | None = None  # the job that it was made from
    code: CodeRecord = CodeRecord()
    varies: tuple[str, ...] = ()  # names of the values that differ between its jobs
    filled_variables: tuple[str, ...] = ()  # variables with placeholders in their values

    @property
    def learns_memory(self) -> bool:
        """Whether the user has left open how much memory it needs."""
        return isinstance(self.need.memory, UnknownMemory)

    def __repr__(self) -> str:
        return f"JobSpec({self.name or ' '.join(self.command)!r})"
