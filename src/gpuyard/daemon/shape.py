"""Jobs as JSON: the stable keys that scripts may rely on. Keys are only ever added; unknown is `null`."""

import shlex
from collections.abc import Sequence
from typing import Any

from msgspec import to_builtins

from gpuyard.core.dependencies import Prospect, prospect
from gpuyard.core.jobs import Attempt, DependencyKind, Job
from gpuyard.core.lifecycle import LIVE, JobState
from gpuyard.core.model import Snapshot
from gpuyard.core.shape import iso_time


def row(job: Job, attempt: Attempt | None, snapshot: Snapshot, now: float) -> dict[str, Any]:
    """A job in a list; `attempt` is its last."""
    need, outcome = job.spec.need, job.outcome
    devices = attempt.devices if attempt is not None and job.attempts else ()
    return {
        "id": job.id,
        "name": job.spec.name,
        "state": str(job.state),
        "tag": job.spec.tag or None,
        "priority": job.priority,
        "user": job.user,
        "command": shlex.join(job.words),
        "gpus": need.devices,
        "vram_mb": need.memory_mb,
        "exclusive": need.is_exclusive,
        "devices": list(devices),
        "gpu_indexes": [_index(device_id, snapshot) for device_id in devices],
        "attempt": job.attempts,
        "submitted_at": iso_time(job.submitted_at),
        "started_at": iso_time(job.started_at),
        "ended_at": iso_time(job.ended_at),
        "elapsed_s": _elapsed(job, now),
        "waited_s": _waited(job, now),
        "time_limit_s": job.spec.time_limit_s,
        "status": outcome.status if outcome is not None else None,
        "outcome": str(outcome.kind) if outcome is not None else None,
        "reason": job.reason,
        "array": job.group,
        "index": job.index,
        "log": attempt.log if attempt is not None else None,
    }


def details(
    job: Job,
    attempts: Sequence[Attempt],
    after: Sequence[tuple[int, DependencyKind, JobState]],
    *,
    with_environment: bool,
) -> dict[str, Any]:
    """What `show` has beyond the row. Values of variables may be secrets."""
    spec = job.spec
    return {
        "cwd": spec.cwd,
        "stdin": spec.stdin,
        "retries": spec.retries,
        "failures": job.failures,
        "grace_s": spec.grace_s,
        "duration_s": spec.duration_s,
        "on_reboot": spec.on_reboot and str(spec.on_reboot),
        "log_cap_mb": spec.log_cap_mb,
        "values": job.values,
        "environment_names": sorted(spec.environment),
        "environment": dict(spec.environment) if with_environment else None,
        "need": to_builtins(spec.need),
        "after": [
            {"id": other, "kind": str(kind), "state": str(state), "met": prospect(kind, state) is Prospect.MET}
            for other, kind, state in after
        ],
        "attempts": [_attempt(attempt) for attempt in attempts],
    }


def _attempt(attempt: Attempt) -> dict[str, Any]:
    outcome = attempt.outcome
    return {
        "number": attempt.number,
        "pid": attempt.pid,
        "devices": list(attempt.devices),
        "lease": attempt.lease_id,
        "started_at": iso_time(attempt.started_at),
        "ended_at": iso_time(attempt.ended_at),
        "outcome": str(outcome.kind) if outcome is not None else None,
        "status": outcome.status if outcome is not None else None,
        "reason": outcome.reason if outcome is not None else None,
        "log": attempt.log,
    }


def _index(device_id: str, snapshot: Snapshot) -> int | None:
    device = snapshot.device(device_id)
    return device.index if device is not None else None


def _elapsed(job: Job, now: float) -> float | None:
    """How long its last attempt has run, or ran."""
    if job.started_at is None or not job.attempts:
        return None
    if job.state in LIVE:
        return max(0.0, now - job.started_at)
    return None if job.ended_at is None else max(0.0, job.ended_at - job.started_at)


def _waited(job: Job, now: float) -> float | None:
    if job.state in LIVE or job.ended_at is not None:
        return None
    return max(0.0, now - job.submitted_at)
