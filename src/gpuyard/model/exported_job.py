"""A job as a script for another scheduler sees it, and which of its settings cannot be exported."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Self

from msgspec import Struct

from gpuyard.model.cluster_terms import ClusterTerms
from gpuyard.model.dependencies import DependencyKind, DependencyState, awaited, unmeetable
from gpuyard.model.job import Job
from gpuyard.model.job_spec import DEFAULT_GRACE_S, DEFAULT_LOG_CAP_MB, OnPreempt
from gpuyard.model.lifecycle import JobState


class NotExported(StrEnum):
    """Settings and features that a script cannot carry over, each with its description."""

    description: str

    def __new__(cls, value: str, description: str) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.description = description
        return member

    ENVIRONMENT = "environment", "the environment of the submission: values may be secrets"
    GROWTH = "growth", "running a job again with more memory after it ran out; the learned figure is exported"
    PREEMPTION = "preemption", "--preempt and --on-preempt"
    GATES = "gates", "limits on GPU and CPU load (--max-gpu, --max-cpu and similar)"
    DEVICES = "devices", "the selection of GPUs (--device, --vendor)"
    LINKS = "links", "how GPUs have to be linked (--linked, --same-node)"
    BATCH = "batch", "a batch's pace, its pruning and its summary"
    TASK = "task", "sessions, logs and markers of workspaces (`workspace start --engine` keeps the last two)"
    LOG_CAP = "log-cap", "the size limit of logs (--log-cap)"
    OUTPUT = "output", "files for output (--output, --error), --split-stderr and --timestamps"
    SIGNAL = "signal", "the signal before a job is stopped (--signal)"
    GRACE = "grace", "the grace period before a job is killed (--grace)"
    REBOOT = "reboot", "what happens after a restart of the machine (--on-reboot)"
    CONTAINER = "container", "the container (--image): the command runs on the host"
    OPTIONS = "options", "options for another engine (--engine-option)"
    TAGS = "tags", "limits on jobs of a tag ([queue.tags])"
    PRIORITY = "priority", "the priority, except that jobs of higher priority are submitted earlier"
    AT_ONCE = "at-once", "limits on jobs of an array that run at once"
    HELD = "held", "holding a job: its submission is commented out"
    SHARE = "share", "shares of a GPU: each job gets whole GPUs, unless config.toml gives the size of the GPUs"
    TIMED_OUT = "timed-out", "retries after a timeout (failures are retried)"
    ONE_FAILED = "one-failed", "--after-failed with several jobs beside other dependencies: all of them have to fail"
    OUTSIDE = "outside", "dependencies on jobs outside the script: such a job does not start by itself"


class ExportedDependency(Struct, frozen=True, kw_only=True):
    job_id: int
    kind: DependencyKind
    is_met: bool


class ExportedJob(Struct, frozen=True, kw_only=True):
    """`template` is the command with `{index}` in it, if nothing else differs between the jobs of its array. `folder`
    has to be created first. `stays` lists what cannot be exported."""

    id: int
    argv: tuple[str, ...]
    cwd: str
    state: JobState
    terms: ClusterTerms
    template: tuple[str, ...] | None = None
    index: int | None = None
    stdin: str | None = None
    folder: str | None = None
    tag: str = ""
    engine: str = ""
    retries: int = 0
    grace_s: float = DEFAULT_GRACE_S
    after: tuple[ExportedDependency, ...] = ()
    stays: tuple[NotExported, ...] = ()


def pack(job: Job, terms: ClusterTerms, after: Sequence[DependencyState]) -> ExportedJob:
    """Return the job for export. `after` are its dependencies: job id, kind and current state."""
    spec, need = job.spec, job.spec.need
    used = {
        NotExported.ENVIRONMENT: True,
        NotExported.GROWTH: True,
        NotExported.PREEMPTION: spec.preempts or spec.on_preempt is not OnPreempt.SUSPEND,
        NotExported.GATES: need.limits_device_load or need.max_cpu_percent is not None,
        NotExported.DEVICES: need.only is not None or need.vendor is not None,
        NotExported.LINKS: need.is_linked or need.is_on_one_node,
        NotExported.BATCH: spec.pace is not None,
        NotExported.TASK: spec.task is not None,
        NotExported.LOG_CAP: spec.log_cap_mb != DEFAULT_LOG_CAP_MB,
        NotExported.OUTPUT: bool(spec.output or spec.error or spec.split_stderr or spec.timestamps),
        NotExported.REBOOT: spec.on_reboot is not None,
        NotExported.CONTAINER: spec.container is not None,
        NotExported.SIGNAL: spec.warning is not None,
    }
    pending = [*awaited(after), *unmeetable(after)]
    has_template = job.index is not None and job.command is None and set(job.values) <= {"index"}
    return ExportedJob(
        id=job.id,
        argv=job.argv,
        cwd=spec.cwd,
        state=job.state,
        terms=terms,
        template=spec.command if has_template else None,
        index=job.index,
        stdin=spec.stdin,
        folder=job.values.get("output") if spec.pace is not None else None,
        tag=spec.tag,
        engine=spec.engine,
        retries=spec.retries,
        grace_s=spec.grace_s,
        after=tuple(ExportedDependency(job_id=each[0], kind=each[1], is_met=each not in pending) for each in after),
        stays=tuple(what for what, is_used in used.items() if is_used),
    )
