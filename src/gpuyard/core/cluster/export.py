"""What a job is to somebody who knows nothing of this queue: a command, the terms it is to run on, what it waits for,
and what only this queue could do for it."""

from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct

from gpuyard.core.cluster.offer import ClusterTerms
from gpuyard.core.job.dependencies import DependencyOutlook, prospect
from gpuyard.core.job.job import DEFAULT_GRACE_S, DEFAULT_LOG_CAP_MB, DependencyKind, Job, OnPreempt
from gpuyard.core.job.lifecycle import JobState


class NotExported(StrEnum):
    """What is not carried over; `WORDS` says it for people."""

    ENVIRONMENT = "environment"
    GROWTH = "growth"
    PREEMPTION = "preemption"
    GATES = "gates"
    DEVICES = "devices"
    BATCH = "batch"
    TASK = "task"
    LOG_CAP = "log-cap"
    GRACE = "grace"
    REBOOT = "reboot"
    OPTIONS = "options"
    TAGS = "tags"
    PRIORITY = "priority"
    AT_ONCE = "at-once"
    HELD = "held"
    SHARE = "share"
    TIMED_OUT = "timed-out"
    OUTSIDE = "outside"


WORDS = {
    NotExported.ENVIRONMENT: "the environment of the submission: values may be secrets",
    NotExported.GROWTH: "running a job again with more memory after it ran out; the learned figure is exported",
    NotExported.PREEMPTION: "--preempt and --on-preempt",
    NotExported.GATES: "bounds on how busy GPUs and CPU may be (--max-gpu, --max-cpu and their like)",
    NotExported.DEVICES: "the choice of certain GPUs (--device, --vendor)",
    NotExported.BATCH: "a batch's pace, its pruning and its summary",
    NotExported.TASK: "sessions, logs and markers of workspaces (`workspace start --engine` keeps the last two)",
    NotExported.LOG_CAP: "bounds on the size of logs (--log-cap)",
    NotExported.GRACE: "the time to end in (--grace)",
    NotExported.REBOOT: "what a restart of the machine leads to (--on-reboot)",
    NotExported.OPTIONS: "options for another engine (--engine-option)",
    NotExported.TAGS: "how many jobs of a tag run at once ([queue.tags])",
    NotExported.PRIORITY: "the priority, but that a higher one is submitted earlier",
    NotExported.AT_ONCE: "how many of an array run at once",
    NotExported.HELD: "that a job is held: its submission is commented out",
    NotExported.SHARE: "shares of a GPU: each job gets whole GPUs, unless config.toml says how large they are",
    NotExported.TIMED_OUT: "retries of what ran over its time limit (there are those of what failed)",
    NotExported.OUTSIDE: "that a job waits for others which are not in the script: it does not start by itself",
}


class ExportedDependency(Struct, frozen=True, kw_only=True):
    job_id: int
    kind: DependencyKind
    is_met: bool


class ExportedJob(Struct, frozen=True, kw_only=True):
    """`template` is the command with `{index}` in it, where nothing else differs between it and others of its array;
    `folder` is to be made first."""

    id: int
    words: tuple[str, ...]
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


def pack(job: Job, terms: ClusterTerms, after: Iterable[tuple[int, DependencyKind, JobState]]) -> ExportedJob:
    spec = job.spec
    is_of_template = job.index is not None and job.command is None and set(job.values) <= {"index"}
    return ExportedJob(
        id=job.id,
        words=job.words,
        cwd=spec.cwd,
        state=job.state,
        terms=terms,
        template=spec.command if is_of_template else None,
        index=job.index,
        stdin=spec.stdin,
        folder=job.values.get("output") if spec.pace is not None else None,
        tag=spec.tag,
        engine=spec.engine,
        retries=spec.retries,
        grace_s=spec.grace_s,
        after=tuple(
            ExportedDependency(job_id=other, kind=kind, is_met=prospect(kind, state) is DependencyOutlook.MET)
            for other, kind, state in after
        ),
        stays=tuple(what for what, is_asked_for in _asked_for(job).items() if is_asked_for),
    )


def _asked_for(job: Job) -> dict[NotExported, bool]:
    spec, need = job.spec, job.spec.need
    return {
        NotExported.ENVIRONMENT: True,
        NotExported.GROWTH: True,
        NotExported.PREEMPTION: spec.preempts or spec.on_preempt is not OnPreempt.SUSPEND,
        NotExported.GATES: need.limits_device_load or need.max_cpu_percent is not None,
        NotExported.DEVICES: need.only is not None or need.vendor is not None,
        NotExported.BATCH: spec.pace is not None,
        NotExported.TASK: spec.task is not None,
        NotExported.LOG_CAP: spec.log_cap_mb != DEFAULT_LOG_CAP_MB,
        NotExported.REBOOT: spec.on_reboot is not None,
    }
