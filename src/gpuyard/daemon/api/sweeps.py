"""Answers about the jobs of one submission: the queue with one row for each sweep and array, the table of the runs of
one, batches with their load gates, and the tasks of workspaces.
"""

import asyncio
import re
import shlex
import sqlite3
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from gpuyard.daemon.api.codec import MOST_LISTED, MOST_ROWS, ROWS_AT_ONCE, copy_fields, wall_time
from gpuyard.daemon.api.explain_wait import explain_briefly
from gpuyard.daemon.api.job_details import figures_of, gpu_labels, last_attempt, make_row, summarise
from gpuyard.daemon.api.slow_requests import ThreadedReader
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.server.http_messages import HttpError
from gpuyard.model.command_line import short_command
from gpuyard.model.job import Job
from gpuyard.model.job_spec import Task
from gpuyard.model.lifecycle import FINISHED, LIVE, WAITING, JobState
from gpuyard.model.selection import parse_state
from gpuyard.policy.wait_reasons import Reason, ReasonKind
from gpuyard.queue.add_submission import batched
from gpuyard.schema.jobs import (
    BatchRunPage,
    BatchRunRow,
    BatchStatus,
    JobRow,
    LiveRun,
    SweepPage,
    SweepRun,
    TaskList,
    TaskRow,
)
from gpuyard.schema.queue import GroupProgress, SweepColumn
from gpuyard.schema.requests import RunsQuery, SweepQuery, TagQuery
from gpuyard.store.arrays_and_sweeps import (
    FoldedRow,
    GroupCounts,
    Present,
    SweepTable,
    TableColumn,
    TableOrder,
    TablePage,
    read_folded,
)
from gpuyard.store.search_jobs import LIVE_IN_ORDER, NOT_READY, PageRange

# The state of a group is the first of these that a job of it has.
_IN_ORDER = (
    *LIVE_IN_ORDER, JobState.QUEUED, *NOT_READY,
    JobState.FAILED, JobState.REJECTED, JobState.CANCELLED, JobState.SUCCEEDED,
)  # fmt: skip
# States that a line of progress names; a job that waits is one that it does not name.
_NAMED = (
    JobState.FAILED, JobState.REJECTED, JobState.CANCELLED, JobState.SUSPENDED, JobState.HELD, JobState.PENDING,
)  # fmt: skip


def group_state(counts: Mapping[JobState, int]) -> JobState:
    """Return the state that stands for all: running if a job runs, and failed if all are over and one failed."""
    return next(state for state in _IN_ORDER if counts.get(state))


def progress_text(counts: Mapping[JobState, int]) -> str:
    """Return a text such as `12/40 done, 2 failed, 4 running`. Done are jobs that have finished, also those that
    failed; pending ones wait at their site."""
    done = sum(count for state, count in counts.items() if state in FINISHED)
    running = sum(count for state, count in counts.items() if state in LIVE - {JobState.SUSPENDED, JobState.PENDING})
    named = [f"{counts[state]:,} {state}" for state in _NAMED if counts.get(state)]
    if running:
        named.append(f"{running:,} running")
    return ", ".join([f"{done:,}/{sum(counts.values()):,} done", *named])


def progress_of(group: GroupCounts) -> GroupProgress:
    count = sum(group.counts.values())
    return GroupProgress(
        ids=f"{group.first}-{group.last}",
        first=group.first,
        last=group.last,
        count=count,
        counts={str(state): jobs for state, jobs in group.counts.items()},
        text=progress_text(group.counts),
    )


def _template_text(command: Sequence[str]) -> str:
    """Return the command as a shell would read it, but with placeholders as they were typed, without quotes."""
    plain = re.compile(r"[\w@%+=:,./{}-]+", re.ASCII)
    return " ".join(word if plain.fullmatch(word) else shlex.quote(word) for word in command)


class JobGroups:
    """Answers about sweeps, arrays, batches and the tasks of workspaces."""

    def __init__(self, scheduler: SchedulerLoop, reader: ThreadedReader) -> None:
        self._scheduler, self._reader = scheduler, reader
        self._table: SweepTable | None = None

    async def page(self, page: PageRange, *, show_all: bool) -> tuple[list[JobRow], int]:
        """Return the rows of a page, and the number of rows on all pages."""
        now = self._scheduler.sampling.now()
        used = self._scheduler.controller.transitions.used(now)
        found = await self._reader.read(lambda connection: read_folded(connection, used, now, page, show_all=show_all))
        rows: list[JobRow] = []
        for some in batched(iter(found.rows), ROWS_AT_ONCE):
            await asyncio.sleep(0)
            jobs = self._scheduler.queries.with_ids([row.job_id for row in some])  # some may have been deleted since
            rows += [self._row(jobs[row.job_id], row) for row in some if row.job_id in jobs]
        return rows, found.total

    def _row(self, job: Job, row: FoldedRow) -> JobRow:
        scheduler, group = self._scheduler, row.group
        plain = make_row(scheduler, job, explain_briefly(scheduler, job))
        if group is None or group.first == group.last:
            return plain
        state, now, is_over = group_state(group.counts), scheduler.clock.now(), group.is_finished
        ended_at = group.ended_at if is_over else None
        command, is_cut = short_command(_template_text(job.spec.command))
        return replace(
            plain,
            id=group.first,
            state=state,
            outcome=None,
            status=None,
            devices=(),
            gpu_labels=[],
            place=None,
            reason=plain.reason if state is job.state and not is_over else None,
            command=command,
            is_command_cut=is_cut,
            index=None,
            values={},
            ended_at=wall_time(scheduler, ended_at),
            elapsed_s=max(0.0, (now if ended_at is None else ended_at) - job.submitted_at),
            waited_s=None,
            error_line=None,
            log=None,
            progress=None,
            figures={},
            group=progress_of(group),
        )

    async def table(self, job_id: int, query: SweepQuery) -> SweepPage:
        """Return a page of the runs of the sweep or array that this job belongs to."""
        limit = min(query.limit, MOST_ROWS)
        scheduler = self._scheduler
        live = ((job_id, figures_of(each.attempt)) for job_id, each in scheduler.controller.transitions.live.items())
        figures = {job_id: {name: each.last for name, each in found.items()} for job_id, found in live if found}
        present = Present(scheduler.clock.now(), figures)
        order = TableOrder(
            column=query.sort.removeprefix("-") or None,
            is_descending=query.sort.startswith("-"),
            states=tuple(parse_state(word) for word in query.state.split(",") if word),
        )
        wanted = PageRange(offset=query.after, count=limit + 1)

        def read(connection: sqlite3.Connection) -> tuple[GroupCounts, Job, list[TableColumn], TablePage] | None:
            self._table = self._table or SweepTable(connection)
            return self._table.read(job_id, order, wanted, present)

        found = await self._reader.read(read)
        if found is None:
            message = f"job {job_id} is not part of a sweep or an array"
            raise HttpError(404, message, hint="`gpuyard queue` lists those that are")
        group, job, columns, page = found
        runs = []
        for place, each in enumerate(page.ids[:limit]):
            if place and place % ROWS_AT_ONCE == 0:
                await asyncio.sleep(0)
            run = scheduler.store.job(each)
            if run is not None and each in page.cells:
                plain = make_row(scheduler, run, explain_briefly(scheduler, run))
                runs.append(copy_fields(SweepRun, plain, cells=page.cells[each]))
        return SweepPage(
            id=group.first,
            name=job.spec.name,
            tag=job.spec.tag or None,
            command=_template_text(job.spec.command),
            submitted_at=wall_time(scheduler, job.submitted_at),
            varies=job.spec.varies,
            progress=progress_of(group),
            columns=[SweepColumn(name=each.name, title=each.title, kind=each.kind) for each in columns],
            jobs=runs,
            next=query.after + limit if len(page.ids) > limit else None,
            total=page.total,
        )

    def batch(self, first_id: int) -> BatchStatus:
        scheduler = self._scheduler
        first, last, token = self._find(first_id)
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
            device_label=None if device_id is None else scheduler.sampling.latest.snapshot.labels.get(device_id),
            waits_s={gate: round(seconds, 3) for gate, seconds in batch.waits_s.items()},
            unknown=batch.unknown,
            silent=batch.silent,
            now=wall_time(scheduler, scheduler.clock.now()),
        )

    def batch_runs(self, first_id: int, query: RunsQuery) -> BatchRunPage:
        """Return a page of its runs, ordered by id."""
        first, last, _ = self._find(first_id)
        limit, runs = max(1, min(query.limit, MOST_ROWS)), list[BatchRunRow]()
        jobs = self._scheduler.queries.jobs_in(max(first, query.after + 1), last, limit + 1)
        for job in jobs[:limit]:
            seconds = None  # that the last attempt took
            if job.started_at is not None and job.ended_at is not None and job.state is not JobState.REJECTED:
                seconds = round(max(0.0, job.ended_at - job.started_at), 3)
            row = copy_fields(
                BatchRunRow,
                summarise(self._scheduler, job, last_attempt(self._scheduler, job), job.reason),
                job,
                index=job.values.get("index"),
                seed=job.values.get("seed"),
                is_finished=job.state in FINISHED,
                is_live=job.state in LIVE,
                seconds=seconds,
            )
            runs.append(row)
        return BatchRunPage(runs=runs, next=runs[-1].id if len(jobs) > limit else None)

    def _find(self, first_id: int) -> tuple[int, int, str | None]:
        """Return its first id, its last id and its token. The first run may have been cleaned while others run."""
        scheduler = self._scheduler
        found = scheduler.queries.submission_of(first_id)
        left = [] if found is None else scheduler.queries.jobs_in(found[0], found[1], 1)
        if found is None or not left or left[0].spec.pace is None:
            raise HttpError(404, f"there is no batch {first_id}", hint="a batch has the id of its first run")
        return found

    def tasks(self, query: TagQuery) -> TaskList:
        """Return, for each config of a workspace, its unfinished jobs, or else its last job."""
        scheduler, tag = self._scheduler, query.tag
        by_config: dict[str, list[Job]] = {}
        for job in scheduler.queries.with_tag(tag, 100_000):
            if job.spec.task is not None:
                others = by_config.setdefault(job.spec.task.config, [])
                others[:] = [each for each in others if each.state not in FINISHED]
                if job.state not in FINISHED or not others:
                    others.append(job)
        jobs = sorted((job for others in by_config.values() for job in others), key=lambda each: each.id)
        return TaskList(
            tag=tag,
            stopped=tag in scheduler.store.stopped_tags(),
            paused=bool(scheduler.store.setting("paused")),
            now=wall_time(scheduler, scheduler.clock.now()),
            tasks=[self._make_task(job, job.spec.task) for job in jobs if job.spec.task is not None],
        )

    def _make_task(self, job: Job, task: Task) -> TaskRow:
        scheduler = self._scheduler
        attempt = last_attempt(scheduler, job)
        usage = attempt.usage if attempt is not None else None
        ran_s = None if attempt is None else attempt.ran_s(attempt.ended_at or scheduler.sampling.now())
        estimates = scheduler.controller.transitions.estimates
        return copy_fields(
            TaskRow,
            summarise(scheduler, job, attempt, explain_briefly(scheduler, job)),
            task,
            job,
            is_live=job.state in LIVE and job.state is not JobState.PENDING,
            is_waiting=job.state in WAITING or job.state is JobState.PENDING,
            is_finished=job.state in FINISHED,
            attempt=job.attempts,
            place=attempt.place if attempt is not None else None,
            gpu_labels=gpu_labels(scheduler, attempt),
            elapsed_s=None if ran_s is None else round(ran_s, 3),
            likely_s=None if job.state in FINISHED else estimates.estimate_of(job.id).likely_s,
            memory_mb=usage.curve[-1][1] if usage is not None and usage.curve and job.state in LIVE else None,
            peak_mb=usage.peak_mb if usage is not None else None,
            reserved_mb=attempt.reserved_mb if attempt is not None else None,
        )
