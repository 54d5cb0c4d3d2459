"""What a user submits: a JobSpec, which all jobs of one submission share."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from gpuyard.core.job.code_record import CodeRecord
from gpuyard.core.job.container import Container
from gpuyard.core.job.shell_settings import ShellSettings
from gpuyard.core.job.workspace_task import Task
from gpuyard.core.lease import Need, UnknownMemory
from gpuyard.core.notify.subscriptions import Subscription

DEFAULT_SMOOTHING_S = 5.0
DEFAULT_STEADY_S = 3.0
DEFAULT_GRACE_S = 10.0
DEFAULT_LOG_CAP_MB = 256.0
# In place of a command that could not be read from the queue's database.
UNREADABLE = ("(cannot be read)",)


class OnReboot(StrEnum):
    REQUEUE = "requeue"
    HOLD = "hold"
    FAIL = "fail"


class OnPreempt(StrEnum):
    """What an urgent job may do to this job: suspend it (or requeue it if it cannot be suspended), stop and requeue it,
    or nothing."""

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
    """A signal that a program gets `lead_s` before it is stopped (`stop_warning.py`)."""

    signum: int
    lead_s: float


class BatchPace(Struct, frozen=True, kw_only=True):
    """The limits of a batch. A limit that is None does not apply."""

    max_cpu_percent: float | None = None
    min_free_memory_mb: float | None = None
    max_gpu_percent: float | None = None
    max_gpu_memory_mb: float | None = None
    run_ram_mb: float | None = None  # the RAM of one run; learned where it is None
    smoothing_s: float = DEFAULT_SMOOTHING_S
    steady_s: float = DEFAULT_STEADY_S
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
    """`min_free_mb` is the least free space, 0 for no limit; None: as configured. `output_root` is the folder of all
    runs of a batch."""

    min_free_mb: float | None = None
    output_root: str | None = None


class JobSpec(Struct, frozen=True, kw_only=True):
    """What the user submitted. `environment` and `notify` may hold secrets: they are in no log and no `repr`.

    `secrets` are the variables that look secret. After its jobs have ended their values are `dropped`: they are not in
    `environment` any more.
    """

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
    output: str | None = None  # pattern of the file for standard output, see `output_files`; None for the queue's log
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
