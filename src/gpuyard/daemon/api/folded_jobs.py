"""The queue with one row for each sweep and array, and the table of the runs of one."""

import asyncio
import re
import shlex
import sqlite3
from collections.abc import Sequence

from msgspec.structs import asdict, replace

from gpuyard.control.add_submission import batched
from gpuyard.core.job.group_progress import group_state, progress_text
from gpuyard.core.job.job import Job
from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.job.short_command import short_command
from gpuyard.daemon.api.codec import MOST_ROWS
from gpuyard.daemon.api.explain_wait import explain_briefly
from gpuyard.daemon.api.job_rows import make_row
from gpuyard.daemon.api.progress_rows import figures_of
from gpuyard.daemon.api.slow_requests import ThreadedReader
from gpuyard.daemon.api.wall_time import wall_time
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.server.http_parser import HttpError
from gpuyard.errors import UserError
from gpuyard.schema.jobs import JobRow
from gpuyard.schema.requests import SweepQuery
from gpuyard.schema.sweep_page import SweepPage, SweepRun
from gpuyard.schema.sweeps import GroupProgress, SweepColumn
from gpuyard.store.folded_queue import FoldedRow, GroupCounts, read_folded
from gpuyard.store.job_search import PageRange
from gpuyard.store.sweep_figures import LiveFigures
from gpuyard.store.sweep_table import Present, SweepTable, TableColumn, TableOrder, TablePage

# Rows that are made before other requests are served.
ROWS_AT_ONCE = 10
_NEEDS_NO_QUOTES = re.compile(r"[\w@%+=:,./{}-]+", re.ASCII)


class FoldedJobs:
    def __init__(self, scheduler: SchedulerLoop, reader: ThreadedReader) -> None:
        self._scheduler = scheduler
        self._reader = reader
        self._table: SweepTable | None = None

    async def page(self, page: PageRange, *, show_all: bool) -> tuple[list[JobRow], int]:
        """Return the rows of a page, and the number of rows on all pages."""
        now = self._scheduler.sampling.now()
        used = self._scheduler.controller.transitions.used(now)
        found = await self._reader.read(lambda connection: read_folded(connection, used, now, page, show_all=show_all))
        rows: list[JobRow] = []
        for some in batched(iter(found.rows), ROWS_AT_ONCE):
            if rows:
                await asyncio.sleep(0)
            jobs = self._scheduler.queries.with_ids([row.job_id for row in some])  # some may have been deleted since
            rows += [self._row(jobs[row.job_id], row) for row in some if row.job_id in jobs]
        return rows, found.total

    def _row(self, job: Job, row: FoldedRow) -> JobRow:
        scheduler, group = self._scheduler, row.group
        plain = make_row(scheduler, job, explain_briefly(scheduler, job))
        if group is None or group.first == group.last:
            return plain
        state, now = group_state(group.counts), scheduler.clock.now()
        is_over = group.is_finished
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
        present = Present(self._scheduler.clock.now(), _live_figures(self._scheduler))
        order = _read_order(query)
        wanted = PageRange(offset=query.after, count=limit + 1)
        found = await self._reader.read(lambda connection: self._read_table(connection, job_id, order, wanted, present))
        if found is None:
            raise HttpError(
                404, f"job {job_id} is not part of a sweep or an array", hint="`gpuyard queue` lists those that are"
            )
        group, job, columns, page = found
        scheduler = self._scheduler
        runs = []
        for place, each in enumerate(page.ids[:limit]):
            if place and place % ROWS_AT_ONCE == 0:
                await asyncio.sleep(0)
            run = scheduler.store.job(each)
            if run is not None and each in page.cells:
                plain = make_row(scheduler, run, explain_briefly(scheduler, run))
                runs.append(SweepRun(**asdict(plain), cells=page.cells[each]))
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

    def _read_table(
        self, connection: sqlite3.Connection, job_id: int, order: TableOrder, page: PageRange, present: Present
    ) -> tuple[GroupCounts, Job, list[TableColumn], TablePage] | None:
        """Read in the thread of the reader, with a connection that is its own."""
        if self._table is None:
            self._table = SweepTable(connection)
        return self._table.read(job_id, order, page, present)


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


def _live_figures(scheduler: SchedulerLoop) -> LiveFigures:
    found = ((job_id, figures_of(live.attempt)) for job_id, live in scheduler.controller.transitions.live.items())
    return {job_id: {name: each.last for name, each in figures.items()} for job_id, figures in found if figures}


def _template_text(command: Sequence[str]) -> str:
    """Return the command as a shell would read it, but with placeholders as they were typed, without quotes."""
    return " ".join(word if _NEEDS_NO_QUOTES.fullmatch(word) else shlex.quote(word) for word in command)


def _read_order(query: SweepQuery) -> TableOrder:
    column = query.sort.removeprefix("-")
    words = [word for word in query.state.split(",") if word]
    if unknown := set(words) - set(JobState):
        raise UserError(f"'{min(unknown)}' is not a state", hint=f"it can be {', '.join(JobState)}")
    states = tuple(map(JobState, words))
    return TableOrder(column=column or None, is_descending=query.sort.startswith("-"), states=states)
