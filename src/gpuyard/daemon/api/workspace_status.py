"""Answers about the tasks of a workspace: for each config, its unfinished jobs, or else its last job."""

from gpuyard.core.job.job import Attempt, Job
from gpuyard.core.job.lifecycle import FINISHED, LIVE, WAITING, JobState
from gpuyard.core.job.workspace_task import Task
from gpuyard.core.snapshot_json import iso_time
from gpuyard.daemon.api.explain_wait import explain_briefly
from gpuyard.daemon.api.job_rows import gpu_index, last_attempt
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.schema.batches import TaskList, TaskRow

_MOST = 100_000


def task_list(scheduler: SchedulerLoop, tag: str) -> TaskList:
    by_config: dict[str, list[Job]] = {}
    for job in scheduler.queries.with_tag(tag, _MOST):
        if job.spec.task is not None:
            others = by_config.setdefault(job.spec.task.config, [])
            others[:] = [each for each in others if each.state not in FINISHED]
            if job.state not in FINISHED or not others:
                others.append(job)
    jobs = sorted((job for others in by_config.values() for job in others), key=lambda job: job.id)
    return TaskList(
        tag=tag,
        stopped=tag in scheduler.store.stopped_tags(),
        paused=bool(scheduler.store.setting("paused")),
        now=iso_time(scheduler.sampling.now()),
        tasks=[_make_task(scheduler, job, job.spec.task) for job in jobs if job.spec.task is not None],
    )


def _make_task(scheduler: SchedulerLoop, job: Job, task: Task) -> TaskRow:
    attempt = last_attempt(scheduler, job)
    devices = attempt.devices if attempt is not None else ()
    snapshot = scheduler.sampling.latest.snapshot
    usage = attempt.usage if attempt is not None else None
    estimates = scheduler.controller.transitions.estimates
    return TaskRow(
        id=job.id,
        config=task.config,
        workspace=task.workspace,
        state=job.state,
        is_live=job.state in LIVE and job.state is not JobState.PENDING,
        is_waiting=job.state in WAITING or job.state is JobState.PENDING,
        is_finished=job.state in FINISHED,
        outcome=None if job.outcome is None else job.outcome.kind,
        status=None if job.outcome is None else job.outcome.status,
        reason=explain_briefly(scheduler, job),
        attempt=job.attempts,
        priority=job.priority,
        devices=devices,
        place=attempt.place if attempt is not None else None,
        gpu_indexes=[gpu_index(device_id, snapshot) for device_id in devices],
        submitted_at=iso_time(job.submitted_at),
        started_at=iso_time(job.started_at),
        ended_at=iso_time(job.ended_at),
        elapsed_s=_elapsed_s(scheduler, attempt),
        likely_s=None if job.state in FINISHED else estimates.estimate_of(job.id).likely_s,
        memory_mb=usage.curve[-1][1] if usage is not None and usage.curve and job.state in LIVE else None,
        peak_mb=usage.peak_mb if usage is not None else None,
        reserved_mb=attempt.reserved_mb if attempt is not None else None,
        log=attempt.log if attempt is not None else None,
    )


def _elapsed_s(scheduler: SchedulerLoop, attempt: Attempt | None) -> float | None:
    """Return how long the last attempt has run."""
    if attempt is None:
        return None
    until = attempt.ended_at if attempt.ended_at is not None else scheduler.sampling.now()
    return round(attempt.ran_s(until), 3)
