"""What is told about a workspace: how its tasks stand. Of a config all jobs that are not over, else the last."""

from typing import Any

from gpuyard.core.job.job import Attempt, Job
from gpuyard.core.job.lifecycle import FINISHED, LIVE, WAITING, JobState
from gpuyard.core.snapshot_json import iso_time
from gpuyard.daemon.api import explain_wait
from gpuyard.daemon.loop import SchedulerLoop

_MOST = 100_000


def standing(scheduler: SchedulerLoop, tag: str) -> dict[str, Any]:
    """Of all jobs with that tag that are tasks."""
    of_config: dict[str, list[Job]] = {}
    for job in scheduler.queries.with_tag(tag, _MOST):
        if job.spec.task is not None:
            others = of_config.setdefault(job.spec.task.config, [])
            others[:] = [each for each in others if each.state not in FINISHED]
            if job.state not in FINISHED or not others:
                others.append(job)
    jobs = [job for others in of_config.values() for job in others]
    return {
        "tag": tag,
        "stopped": tag in scheduler.store.stopped_tags(),
        "paused": bool(scheduler.store.setting("paused")),
        "now": iso_time(scheduler.sampling.now()),
        "tasks": [_task(scheduler, job) for job in sorted(jobs, key=lambda job: job.id)],
    }


def _task(scheduler: SchedulerLoop, job: Job) -> dict[str, Any]:
    assert job.spec.task is not None
    attempt = _last_attempt(scheduler, job)
    devices = attempt.devices if attempt is not None else ()
    snapshot = scheduler.sampling.latest.snapshot
    found = [snapshot.device(device_id) for device_id in devices]
    usage = attempt.usage if attempt is not None else None
    return {
        "id": job.id,
        "config": job.spec.task.config,
        "workspace": job.spec.task.workspace,
        "state": str(job.state),
        "is_live": job.state in LIVE and job.state is not JobState.PENDING,
        "is_waiting": job.state in WAITING or job.state is JobState.PENDING,
        "is_finished": job.state in FINISHED,
        "outcome": None if job.outcome is None else str(job.outcome.kind),
        "status": None if job.outcome is None else job.outcome.status,
        "reason": explain_wait.in_brief(scheduler, job),
        "attempt": job.attempts,
        "priority": job.priority,
        "devices": list(devices),
        "place": attempt.place if attempt is not None else None,
        "gpu_indexes": [None if device is None else device.index for device in found],
        "submitted_at": iso_time(job.submitted_at),
        "started_at": iso_time(job.started_at),
        "ended_at": iso_time(job.ended_at),
        "elapsed_s": _elapsed(scheduler, attempt),
        "likely_s": None
        if job.state in FINISHED
        else scheduler.controller.transitions.estimates.estimate_of(job.id).likely_s,
        "memory_mb": usage.curve[-1][1] if usage is not None and usage.curve and job.state in LIVE else None,
        "peak_mb": usage.peak_mb if usage is not None else None,
        "reserved_mb": attempt.reserved_mb if attempt is not None else None,
        "log": attempt.log if attempt is not None else None,
    }


def _last_attempt(scheduler: SchedulerLoop, job: Job) -> Attempt | None:
    live = scheduler.controller.transitions.live.get(job.id)
    if live is not None:
        return live.attempt
    attempts = scheduler.store.attempts(job.id) if job.attempts else []
    return attempts[-1] if attempts else None


def _elapsed(scheduler: SchedulerLoop, attempt: Attempt | None) -> float | None:
    """How long its last attempt has run, or ran."""
    if attempt is None:
        return None
    until = attempt.ended_at if attempt.ended_at is not None else scheduler.sampling.now()
    return round(attempt.ran_s(until), 3)
