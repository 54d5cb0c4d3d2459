"""Answers about a batch: its progress, the gate that holds back its next run, and the result of each run."""

from gpuyard.core.job.job import Job
from gpuyard.core.job.lifecycle import FINISHED, LIVE, JobState
from gpuyard.core.scheduling.wait_reasons import Reason, ReasonKind
from gpuyard.core.snapshot_json import iso_time
from gpuyard.daemon.api.job_rows import gpu_index
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.server.http_parser import HttpError
from gpuyard.schema.batches import BatchRunPage, BatchRunRow, BatchStatus, LiveRun

_MOST_RUNNING = 100


def batch_status(scheduler: SchedulerLoop, first_id: int) -> BatchStatus:
    first, last, token = _find_batch(scheduler, first_id)
    counts = scheduler.queries.counts_in(first, last)
    gate, reason = _closed_gate(scheduler, first)
    batch = scheduler.controller.batch_gates.saved_state(first)
    live = [each.job for each in scheduler.controller.transitions.live.values() if first <= each.job.id <= last]
    device_id = None if reason is None else reason.device_id
    snapshot = scheduler.sampling.latest.snapshot
    return BatchStatus(
        id=first,
        first=first,
        last=last,
        token=token,
        count=sum(counts.values()),
        done=all(state in FINISHED for state, count in counts.items() if count),
        counts={str(state): count for state, count in counts.items()},
        running=[LiveRun(id=job.id, index=job.values.get("index")) for job in live[:_MOST_RUNNING]],
        gate=gate,
        held_by=None if reason is None else reason.text,
        device=device_id,
        device_index=None if device_id is None else gpu_index(device_id, snapshot),
        waits_s={gate: round(seconds, 3) for gate, seconds in batch.waits_s.items()},
        unknown=tuple(batch.unknown),
        now=iso_time(scheduler.sampling.now()),
    )


def batch_runs(scheduler: SchedulerLoop, first_id: int, after: int, limit: int) -> BatchRunPage:
    """Return a page of its runs, ordered by id."""
    first, last, _ = _find_batch(scheduler, first_id)
    jobs = scheduler.queries.jobs_in(max(first, after + 1), last, limit + 1)
    page = jobs[:limit]
    return BatchRunPage(
        runs=[_make_run(scheduler, job) for job in page], next=page[-1].id if len(jobs) > limit else None
    )


def _closed_gate(scheduler: SchedulerLoop, first_id: int) -> tuple[str | None, Reason | None]:
    """Return the gate that holds the next run back. A paused queue counts as a gate: no run reaches the others then."""
    if scheduler.store.setting("paused"):
        return "pause", Reason(ReasonKind.PAUSED, "the queue is paused: `gpuyard unpause` resumes it")
    return scheduler.controller.batch_gates.held_by(first_id) or (None, None)


def _find_batch(scheduler: SchedulerLoop, first_id: int) -> tuple[int, int, str | None]:
    """Return its first id, its last id and its token. The first run may have been cleaned while others still run."""
    found = scheduler.queries.submission_of(first_id)
    left = [] if found is None else scheduler.queries.jobs_in(found[0], found[1], 1)
    if found is None or not left or left[0].spec.pace is None:
        raise HttpError(404, f"there is no batch {first_id}", hint="a batch has the id of its first run")
    return found


def _make_run(scheduler: SchedulerLoop, job: Job) -> BatchRunRow:
    attempts = scheduler.store.attempts(job.id)
    return BatchRunRow(
        id=job.id,
        index=job.values.get("index"),
        seed=job.values.get("seed"),
        state=job.state,
        is_finished=job.state in FINISHED,
        is_live=job.state in LIVE,
        outcome=None if job.outcome is None else job.outcome.kind,
        status=None if job.outcome is None else job.outcome.status,
        reason=job.reason,
        attempts=job.attempts,
        submitted_at=iso_time(job.submitted_at),
        started_at=iso_time(job.started_at),
        ended_at=iso_time(job.ended_at),
        seconds=_duration_s(job),
        log=attempts[-1].log if attempts else None,
        devices=attempts[-1].devices if attempts else (),
    )


def _duration_s(job: Job) -> float | None:
    """Return how long the last attempt took."""
    if job.started_at is None or job.ended_at is None or job.state is JobState.REJECTED:
        return None
    return round(max(0.0, job.ended_at - job.started_at), 3)
