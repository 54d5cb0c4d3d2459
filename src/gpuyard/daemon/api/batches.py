"""Answers about batches (progress, the gate that holds the next run back, each run), and about tasks of workspaces."""

from msgspec.structs import asdict

from gpuyard.core.job.job import Job
from gpuyard.core.job.lifecycle import FINISHED, LIVE, WAITING, JobState
from gpuyard.core.job.workspace_task import Task
from gpuyard.core.scheduling.wait_reasons import Reason, ReasonKind
from gpuyard.daemon.api.codec import MOST_LISTED, MOST_ROWS
from gpuyard.daemon.api.explain_wait import explain_briefly
from gpuyard.daemon.api.job_rows import gpu_label, gpu_labels, last_attempt, summarise
from gpuyard.daemon.api.wall_time import wall_time
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.server.http_parser import HttpError
from gpuyard.schema.jobs import BatchRunPage, BatchRunRow, BatchStatus, LiveRun, TaskList, TaskRow
from gpuyard.schema.requests import RunsQuery, TagQuery

_MOST_TASKS = 100_000


def batch_status(scheduler: SchedulerLoop, first_id: int) -> BatchStatus:
    first, last, token = _find_batch(scheduler, first_id)
    counts = scheduler.queries.counts_in(first, last)
    # A paused queue counts as a gate: no run reaches the others then.
    paused = "pause", Reason(ReasonKind.PAUSED, "the queue is paused: `gpuyard unpause` resumes it")
    held_by = scheduler.controller.batch_gates.held_by(first) or (None, None)
    gate, reason = paused if scheduler.store.setting("paused") else held_by
    batch = scheduler.controller.batch_gates.saved_state(first)
    live = [each.job for each in scheduler.controller.transitions.live.values() if first <= each.job.id <= last]
    device_id = None if reason is None else reason.device_id
    return BatchStatus(
        id=first,
        first=first,
        last=last,
        token=token,
        count=sum(counts.values()),
        done=all(state in FINISHED for state, count in counts.items() if count),
        counts={str(state): count for state, count in counts.items()},
        running=[LiveRun(id=job.id, index=job.values.get("index")) for job in live[:MOST_LISTED]],
        gate=gate,
        held_by=None if reason is None else reason.text,
        device=device_id,
        device_label=None if device_id is None else gpu_label(scheduler, device_id),
        waits_s={gate: round(seconds, 3) for gate, seconds in batch.waits_s.items()},
        unknown=batch.unknown,
        silent=batch.silent,
        now=wall_time(scheduler, scheduler.clock.now()),
    )


def batch_runs(scheduler: SchedulerLoop, first_id: int, query: RunsQuery) -> BatchRunPage:
    """Return a page of its runs, ordered by id."""
    first, last, _ = _find_batch(scheduler, first_id)
    limit = max(1, min(query.limit, MOST_ROWS))
    jobs = scheduler.queries.jobs_in(max(first, query.after + 1), last, limit + 1)
    page = jobs[:limit]
    return BatchRunPage(
        runs=[_make_run(scheduler, job) for job in page], next=page[-1].id if len(jobs) > limit else None
    )


def _find_batch(scheduler: SchedulerLoop, first_id: int) -> tuple[int, int, str | None]:
    """Return its first id, its last id and its token. The first run may have been cleaned while others still run."""
    found = scheduler.queries.submission_of(first_id)
    left = [] if found is None else scheduler.queries.jobs_in(found[0], found[1], 1)
    if found is None or not left or left[0].spec.pace is None:
        raise HttpError(404, f"there is no batch {first_id}", hint="a batch has the id of its first run")
    return found


def _make_run(scheduler: SchedulerLoop, job: Job) -> BatchRunRow:
    seconds = None  # that the last attempt took
    if job.started_at is not None and job.ended_at is not None and job.state is not JobState.REJECTED:
        seconds = round(max(0.0, job.ended_at - job.started_at), 3)
    return BatchRunRow(
        **asdict(summarise(scheduler, job, last_attempt(scheduler, job), job.reason)),
        index=job.values.get("index"),
        seed=job.values.get("seed"),
        is_finished=job.state in FINISHED,
        is_live=job.state in LIVE,
        attempts=job.attempts,
        seconds=seconds,
    )


# Tasks of workspaces


def task_list(scheduler: SchedulerLoop, query: TagQuery) -> TaskList:
    """Return, for each config of a workspace, its unfinished jobs, or else its last job."""
    tag = query.tag
    by_config: dict[str, list[Job]] = {}
    for job in scheduler.queries.with_tag(tag, _MOST_TASKS):
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
        now=wall_time(scheduler, scheduler.clock.now()),
        tasks=[_make_task(scheduler, job, job.spec.task) for job in jobs if job.spec.task is not None],
    )


def _make_task(scheduler: SchedulerLoop, job: Job, task: Task) -> TaskRow:
    attempt = last_attempt(scheduler, job)
    usage = attempt.usage if attempt is not None else None
    estimates = scheduler.controller.transitions.estimates
    return TaskRow(
        **asdict(summarise(scheduler, job, attempt, explain_briefly(scheduler, job))),
        config=task.config,
        workspace=task.workspace,
        is_live=job.state in LIVE and job.state is not JobState.PENDING,
        is_waiting=job.state in WAITING or job.state is JobState.PENDING,
        is_finished=job.state in FINISHED,
        attempt=job.attempts,
        priority=job.priority,
        place=attempt.place if attempt is not None else None,
        gpu_labels=gpu_labels(scheduler, attempt),
        elapsed_s=None if attempt is None else round(attempt.ran_s(attempt.ended_at or scheduler.sampling.now()), 3),
        likely_s=None if job.state in FINISHED else estimates.estimate_of(job.id).likely_s,
        memory_mb=usage.curve[-1][1] if usage is not None and usage.curve and job.state in LIVE else None,
        peak_mb=usage.peak_mb if usage is not None else None,
        reserved_mb=attempt.reserved_mb if attempt is not None else None,
    )
