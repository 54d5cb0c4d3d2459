"""What is told about a batch: how far it is, which gate holds its next run back, and what became of each run."""

from typing import Any

from gpuyard.core.job.job import Job
from gpuyard.core.job.lifecycle import FINISHED, LIVE, JobState
from gpuyard.core.scheduling.wait_reasons import Reason, ReasonKind
from gpuyard.core.snapshot_json import iso_time
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.server.http_parser import HttpError

_MOST_RUNNING = 100


def standing(scheduler: SchedulerLoop, first_id: int) -> dict[str, Any]:
    first, last, token = _range(scheduler, first_id)
    counts = scheduler.queries.counts_in(first, last)
    unfinished = sum(count for state, count in counts.items() if state not in FINISHED)
    gate, reason = _held_by(scheduler, first)
    batch = scheduler.controller.batch_gates.batch(first)
    live = [each for each in scheduler.controller.transitions.live.values() if first <= each.job.id <= last]
    return {
        "id": first,
        "first": first,
        "last": last,
        "token": token,
        "count": sum(counts.values()),
        "done": unfinished == 0,
        "counts": {str(state): count for state, count in counts.items()},
        "running": [{"id": each.job.id, "index": each.job.values.get("index")} for each in live[:_MOST_RUNNING]],
        "gate": gate,
        "held_by": None if reason is None else reason.text,
        "device": None if reason is None else reason.device_id,
        "device_index": _index(scheduler, reason),
        "waits_s": {gate: round(seconds, 3) for gate, seconds in batch.waits_s.items()},
        "unknown": list(batch.unknown),
        "now": iso_time(scheduler.sampling.now()),
    }


def _held_by(scheduler: SchedulerLoop, first_id: int) -> tuple[str | None, Reason | None]:
    """While the queue is paused nobody comes to its gates, and what comes after the runs waits as well."""
    if scheduler.store.setting("paused"):
        return "pause", Reason(ReasonKind.PAUSED, "the queue is paused: `gpuyard unpause` lets it go on")
    return scheduler.controller.batch_gates.held_by(first_id) or (None, None)


def _index(scheduler: SchedulerLoop, reason: Reason | None) -> int | None:
    device_id = None if reason is None else reason.device_id
    device = None if device_id is None else scheduler.sampling.latest.snapshot.device(device_id)
    return None if device is None else device.index


def runs(scheduler: SchedulerLoop, first_id: int, after: int, limit: int) -> dict[str, Any]:
    """A page of its runs, in the order of their ids."""
    first, last, _ = _range(scheduler, first_id)
    jobs = scheduler.queries.jobs_in(max(first, after + 1), last, limit + 1)
    page = jobs[:limit]
    return {"runs": [_run(scheduler, job) for job in page], "next": page[-1].id if len(jobs) > limit else None}


def _range(scheduler: SchedulerLoop, first_id: int) -> tuple[int, int, str | None]:
    """Its first run may have been forgotten while others go on."""
    found = scheduler.queries.submission_of(first_id)
    left = [] if found is None else scheduler.queries.jobs_in(found[0], found[1], 1)
    if found is None or not left or left[0].spec.pace is None:
        raise HttpError(404, f"there is no batch {first_id}", hint="its number is that of its first run")
    return found


def _run(scheduler: SchedulerLoop, job: Job) -> dict[str, Any]:
    attempts = scheduler.store.attempts(job.id)
    return {
        "id": job.id,
        "index": job.values.get("index"),
        "seed": job.values.get("seed"),
        "state": str(job.state),
        "is_finished": job.state in FINISHED,
        "is_live": job.state in LIVE,
        "outcome": None if job.outcome is None else str(job.outcome.kind),
        "status": None if job.outcome is None else job.outcome.status,
        "reason": job.reason,
        "attempts": job.attempts,
        "submitted_at": iso_time(job.submitted_at),
        "started_at": iso_time(job.started_at),
        "ended_at": iso_time(job.ended_at),
        "seconds": _seconds(job),
        "log": attempts[-1].log if attempts else None,
        "devices": list(attempts[-1].devices) if attempts else [],
    }


def _seconds(job: Job) -> float | None:
    """How long its last attempt took."""
    if job.started_at is None or job.ended_at is None or job.state is JobState.REJECTED:
        return None
    return round(max(0.0, job.ended_at - job.started_at), 3)
