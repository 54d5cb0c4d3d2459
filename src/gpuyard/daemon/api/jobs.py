"""Routes that read and change jobs: those with given ids, or all that match.

Conditions are looked up in the reader's thread, so that a selection of 100,000 jobs delays no other request.
"""

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, islice
from typing import TYPE_CHECKING

from msgspec.structs import asdict, replace

from gpuyard.daemon.api.codec import EXPORT_PAGE, MOST_LISTED, MOST_ROWS, ROWS_AT_ONCE
from gpuyard.daemon.api.explain_wait import explain, explain_briefly, export_world, job_history
from gpuyard.daemon.api.job_details import all_attempts, code_of, make_details, make_row
from gpuyard.daemon.api.slow_requests import ThreadedReader, run_in_pieces
from gpuyard.daemon.job_code import CodeWatch
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.server.http_messages import HttpError
from gpuyard.errors import UserError
from gpuyard.model.exported_job import pack
from gpuyard.model.job import Job
from gpuyard.model.lifecycle import FINISHED, WAITING, JobState
from gpuyard.model.selection import MOST_RANGES, JobSelection, format_ids, merge_ranges, parse_selection, parse_state
from gpuyard.policy.queue_order import full_order
from gpuyard.queue.add_submission import batched
from gpuyard.queue.user_requests import Act, Supply, refuse_empty_range, refuse_no_match
from gpuyard.schema import requests
from gpuyard.schema.jobs import (
    ExportedWorld,
    ExportPage,
    JobDetails,
    JobHistory,
    JobPage,
    JobRow,
    WaitExplanation,
)
from gpuyard.schema.queue import ChangeSummary, LackingJobs, QueueState, UnchangedJob
from gpuyard.store.search_jobs import LIVE_IN_ORDER, NOT_READY, RECENTLY_FINISHED, JobFilter, PageRange, SearchResult

if TYPE_CHECKING:
    from gpuyard.daemon.api.sweeps import JobGroups

SAMPLE_FOR_PEOPLE_S = 0.5
# Pages up to this length are found without a thread.
_PAGE = 200
# What a retry of a selection runs again. A cancelled job was stopped on purpose.
UNSUCCESSFUL = (JobState.FAILED, JobState.REJECTED)
# Ranges of ids that are looked up before other requests are served.
_RANGES_AT_ONCE = 200


class SelectionReader:
    def __init__(self, scheduler: SchedulerLoop, reader: ThreadedReader) -> None:
        self._selected = scheduler.requests.selected
        self._reader = reader

    async def find(self, text: str) -> list[tuple[int, int]]:
        """Return the ids as ranges; none if no job meets the conditions. UserError for ids that do not exist."""
        selection = parse_selection(text)
        if not selection.has_conditions:
            return self._selected.ranges(selection)
        located = self._selected.located(selection)
        return await self._reader.search(lambda search: search.selected_ranges(located))

    async def ranges(self, text: str) -> list[tuple[int, int]]:
        """Return the ids as ranges. UserError if no job matches."""
        found = await self.find(text)
        refuse_no_match(parse_selection(text), found)
        return found

    def repeatable(self, text: str, ranges: list[tuple[int, int]], ids: str) -> str:
        """Return what selects the same jobs in a later request: `ids`, the ranges, unless these are too many."""
        if len(ranges) <= MOST_RANGES:
            return ids
        if text and parse_selection(text).is_lasting:
            return text
        raise UserError(
            f"these jobs have {len(ranges):,} separate ranges of ids, which are too many to wait for",
            hint="select them by ids, tag= or name= alone",
        )

    def is_broad(self, body: requests.ChangeRequest) -> bool:
        """Return whether jobs are selected that the user has not named one by one, in whatever state they are."""
        if body.where is not None:
            return True
        if isinstance(body.ids, list) and all(isinstance(each, int) for each in body.ids):
            return False
        selection = parse_selection(_ids_text(body))
        return not selection.states and not selection.names_each_job

    async def pieces(self, body: requests.ChangeRequest, only: tuple[JobState, ...] = ()) -> list[JobSelection]:
        """Return the selected jobs in pieces. Their states are checked again when they are changed."""
        if body.where is None:
            text = _ids_text(body)
            # A list of thousands of ids takes long to parse.
            is_long = len(text) > 8192
            selection = await asyncio.to_thread(parse_selection, text) if is_long else parse_selection(text)
            is_given = not selection.has_conditions and not selection.is_all
            if is_given and len(selection.ranges) <= _RANGES_AT_ONCE:
                return [replace(selection, states=only)]
            if is_given:  # all are named one by one, and a job has to be in each range
                refuse_empty_range(await self._reader.search(lambda search: search.empty_range(selection.ranges)))
                ranges = merge_ranges(selection.ranges)
            else:
                ranges = await self.ranges(text)
            states = selection.states
        else:
            if body.ids:
                raise UserError("ids and where do not go together", hint="give one of them")
            wanted = read_filter(body.where)
            if wanted.is_plain and not wanted.states:
                raise UserError("where matches every job", hint='send {"ids": "all"} to change all jobs')
            ranges, states = await self._reader.search(lambda search: search.ranges(wanted)), wanted.states
        return [
            JobSelection(ranges=tuple(ranges[first : first + _RANGES_AT_ONCE]), states=only or states)
            for first in range(0, len(ranges), _RANGES_AT_ONCE)
        ]


def read_filter(query: requests.JobMatch) -> JobFilter:
    """Return which jobs are wanted, without their ids."""
    return JobFilter(
        states=tuple(parse_state(word) for word in query.state.split(",") if word),
        search=query.search.strip()[:1000],
        tag=query.tag,
        user=query.user,
    )


def _ids_text(body: requests.ChangeRequest) -> str:
    ids = body.ids if isinstance(body.ids, list) else [] if body.ids is None else [body.ids]
    return " ".join(map(str, ids))


class JobHandler:
    def __init__(self, scheduler: SchedulerLoop, reader: ThreadedReader, code: CodeWatch) -> None:
        self._scheduler, self._code, self._reader = scheduler, code, reader
        self.selection = SelectionReader(scheduler, reader)

    @cached_property
    def folded(self) -> "JobGroups":
        from gpuyard.daemon.api.sweeps import JobGroups  # with the first request for it

        return JobGroups(self._scheduler, self._reader)

    async def page(self, query: requests.JobsQuery) -> JobPage:
        scheduler, limit, offset, wanted = self._scheduler, min(query.limit, MOST_ROWS), query.after, read_filter(query)
        is_whole = not query.ids and query.order == "queue" and wanted == JobFilter()
        if query.fold and is_whole and scheduler.queries.has_groups():
            rows, total = await self.folded.page(PageRange(offset=offset, count=limit), show_all=query.all)
            following = offset + limit if total > offset + limit else None
            return JobPage(**asdict(queue_state(scheduler)), jobs=rows, next=following, total=total)
        if query.ids:
            wanted = replace(wanted, ranges=tuple(await self.selection.find(query.ids)))
        # The first matches are found at once, unless they are few among many finished jobs.
        finished = FINISHED & set(wanted.states)
        is_quick = wanted.is_plain and (not finished or finished == FINISHED)
        if offset == 0 and limit <= _PAGE and query.order == "queue" and is_quick:
            jobs = list(islice(_jobs_in_order(scheduler, wanted.states, show_all=query.all), limit + 1))
            has_more, all_jobs = len(jobs) > limit, self._count(wanted, show_all=query.all)
            rows = await self._make_rows(jobs[:limit])
        else:
            found = await self._find(wanted, PageRange(offset=offset, count=limit + 1), query)
            has_more, all_jobs = len(found.ids) > limit, found.total
            # Read one by one as rows are made. A job may have changed since it was found, or be gone.
            read = filter(None, map(scheduler.store.job, found.ids[:limit]))
            rows = await self._make_rows(job for job in read if not wanted.states or job.state in wanted.states)
        following = offset + limit if has_more else None
        return JobPage(**asdict(queue_state(scheduler)), jobs=rows, next=following, total=all_jobs)

    async def _find(self, wanted: JobFilter, page: PageRange, query: requests.JobsQuery) -> SearchResult:
        if query.order == "newest":
            return await self._reader.search(lambda search: search.newest(wanted, page))
        now = self._scheduler.sampling.now()
        if query.order != "queue":
            return await self._reader.search(lambda search: search.sorted(wanted, page, query.order, now))
        used = self._scheduler.controller.transitions.used(now)
        return await self._reader.search(lambda search: search.page(wanted, used, now, page, show_all=query.all))

    def _count(self, wanted: JobFilter, *, show_all: bool) -> int | None:
        """Return the number of matching jobs; None while a submission is being stored, as its jobs count already."""
        if self._scheduler.store.arriving:
            return None
        counts = self._scheduler.store.counts()
        states = wanted.states or tuple(JobState)
        finished = sum(counts[state] for state in states if state in FINISHED)
        if not show_all and not wanted.states:
            finished = min(finished, RECENTLY_FINISHED)
        return finished + sum(counts[state] for state in states if state not in FINISHED)

    async def _make_rows(self, jobs: Iterable[Job]) -> list[JobRow]:
        """Make rows a few at a time, so that other requests are served in between."""
        rows = []
        for place, job in enumerate(jobs):
            if place and place % ROWS_AT_ONCE == 0:
                await asyncio.sleep(0)
            rows.append(make_row(self._scheduler, job, explain_briefly(self._scheduler, job)))
        return rows

    async def show(self, job_id: int, query: requests.ShowQuery) -> JobDetails:
        code = await code_of(self._scheduler, self._code, find_job(self._scheduler, job_id))
        job = find_job(self._scheduler, job_id)  # it may have changed meanwhile
        return make_details(self._scheduler, job, code, with_environment=query.environment)

    async def why(self, job_id: int) -> WaitExplanation:
        job = find_job(self._scheduler, job_id)
        await self._scheduler.sampling.fresh(SAMPLE_FOR_PEOPLE_S)
        return explain(self._scheduler, job)

    async def world(self, job_id: int) -> ExportedWorld:
        await self._scheduler.sampling.fresh(SAMPLE_FOR_PEOPLE_S)
        return export_world(self._scheduler, find_job(self._scheduler, job_id))

    def history(self, job_id: int) -> JobHistory:
        job = find_job(self._scheduler, job_id)
        return job_history(
            self._scheduler, job, all_attempts(self._scheduler, job), self._scheduler.queries.events(job_id)
        )

    async def export(self, query: requests.ExportQuery) -> ExportPage:
        """Return jobs for another scheduler, ordered by id: those with these ids, or all that wait."""
        scheduler, store, queries = self._scheduler, self._scheduler.store, self._scheduler.queries
        ranges, states = [(1, queries.last_id())], sorted(WAITING)
        if query.ids:
            ranges, states = await self.selection.ranges(query.ids), []
        found = (queries.ids(max(first, query.after + 1), last, states or None) for first, last in ranges)
        ids = list(islice(chain.from_iterable(found), EXPORT_PAGE + 1))
        jobs = [
            pack(job, scheduler.controller.cluster_dispatch.terms(job.id), store.dependencies(job.id))
            for job in filter(None, map(store.job, ids[:EXPORT_PAGE]))
        ]
        return ExportPage(jobs=jobs, next=ids[EXPORT_PAGE - 1] if len(ids) > EXPORT_PAGE else None)

    # Change

    async def suspend(self, body: requests.ChangeRequest) -> ChangeSummary:
        sample = await self._scheduler.sampling.fresh(SAMPLE_FOR_PEOPLE_S)
        return await self.change(lambda job, now: self._scheduler.requests.suspend(job, now, sample), body)

    async def prioritise(self, body: requests.PriorityRequest) -> ChangeSummary:
        return await self.change(
            lambda job, now: self._scheduler.requests.prioritise(job, now, body.priority), body, takes_back=True
        )

    async def retry(self, body: requests.RetryRequest) -> ChangeSummary:
        """Retry the jobs that are named one by one; of a larger selection only those that failed or were rejected,
        unless it says otherwise."""
        ask = self._scheduler.requests
        act = ask.retry_only if body.only else ask.retry
        if body.all or (body.where is not None and body.where.state) or not self.selection.is_broad(body):
            return await self.change(act, body)
        ranges = [each for piece in await self.selection.pieces(body) for each in piece.ranges]
        counts = await self._reader.search(lambda search: search.count_states(ranges))
        left = {state: counts[state] for state in counts if state in FINISHED and state not in UNSUCCESSFUL}
        return replace(await self.change(act, body, only=UNSUCCESSFUL), left_alone=left)

    async def change(
        self, act: Act, body: requests.ChangeRequest, only: tuple[JobState, ...] = (), *, takes_back: bool = False
    ) -> ChangeSummary:
        """Change the jobs that the body selects; those in other states than `only` stay as they are. With `takes_back`,
        those that wait at a cluster are taken back before, and can be changed as jobs that wait here."""
        pieces = await self.selection.pieces(body, only)
        with self._scheduler.controller.cluster_dispatch.during_change():
            result = await self._change(act, body, await self._take_back(pieces) if takes_back else pieces)
        self._scheduler.wake()
        return result

    async def _take_back(self, pieces: Sequence[JobSelection]) -> list[JobSelection]:
        """Take back the selected jobs that wait at a cluster. Return the same selection: they are queued now."""
        waiting = sorted(each.job.id for each in self._scheduler.controller.cluster_dispatch.waiting_there())
        selected = [
            job_id
            for piece in pieces
            if waiting and (not piece.states or JobState.PENDING in piece.states)
            for first, last in piece.ranges
            for job_id in waiting[bisect_left(waiting, first) : bisect_right(waiting, last)]
        ]
        await self._scheduler.take_back(selected)
        if not selected:
            return list(pieces)
        return [
            replace(each, states=(*each.states, JobState.QUEUED)) if JobState.PENDING in each.states else each
            for each in pieces
        ]

    async def _change(self, act: Act, body: requests.ChangeRequest, pieces: Sequence[JobSelection]) -> ChangeSummary:
        ids: list[int] = []
        unchanged: list[UnchangedJob] = []
        revived: list[int] = []
        supply = None
        if isinstance(body, requests.RunAgainRequest):
            supply = Supply(values=body.environment, allow_missing=body.allow_missing)
        for place, selection in enumerate(pieces, 1):
            is_last = place == len(pieces)
            change = self._scheduler.requests.change(selection, act, supply, is_last=is_last)
            changed = await run_in_pieces(change, self._scheduler.checkpoints.may_write)
            ids += changed.ids
            unchanged += changed.unchanged
            revived += changed.revived
        self._scheduler.finish_signal.announce()
        if len(ids) + len(unchanged) + len(revived) > 2000:
            return await asyncio.to_thread(_summary, ids, unchanged, revived)
        return _summary(ids, unchanged, revived)


def _summary(ids: Sequence[int], unchanged: Sequence[UnchangedJob], revived: Sequence[int]) -> ChangeSummary:
    lacking = [job for job in unchanged if job.variables]
    variables = sorted({name for job in lacking for name in job.variables})
    return ChangeSummary(
        changed=format_ids(ids),
        count=len(ids),
        unchanged=list(unchanged[:MOST_LISTED]),
        unchanged_count=len(unchanged),
        revived=format_ids(revived),
        revived_count=len(revived),
        lacking=LackingJobs(ids=format_ids(job.id for job in lacking), count=len(lacking), variables=variables)
        if lacking
        else None,
    )


def queue_state(scheduler: SchedulerLoop) -> QueueState:
    return QueueState(
        paused=bool(scheduler.store.setting("paused")),
        draining=bool(scheduler.store.setting("draining")),
        counts={str(state): count for state, count in scheduler.store.counts().items()},
        notices=scheduler.all_notices(),
    )


def find_job(scheduler: SchedulerLoop, job_id: int) -> Job:
    job = None if scheduler.store.is_arriving(job_id) else scheduler.store.job(job_id)
    if job is None:
        raise HttpError(404, f"there is no job {job_id}", hint="`gpuyard queue --all` lists all jobs")
    return job


def _jobs_in_order(scheduler: SchedulerLoop, states: Sequence[JobState], *, show_all: bool) -> Iterator[Job]:
    """Yield live jobs, queued ones in queue order, those that cannot start yet, and the last that finished."""
    wanted = set(states or JobState)
    for state in LIVE_IN_ORDER:
        yield from _jobs_in_state(scheduler, [state] if state in wanted else [])
    if JobState.QUEUED in wanted:
        now = scheduler.sampling.now()
        used = scheduler.controller.transitions.used(now)
        ordered = (each.job_id for each in full_order(scheduler.store.ready_queues(), used, now))
        for ids in batched(ordered, ROWS_AT_ONCE):
            jobs = scheduler.queries.with_ids(ids)
            yield from (jobs[job_id] for job_id in ids if job_id in jobs)
    yield from _jobs_in_state(scheduler, [state for state in NOT_READY if state in wanted])
    if not wanted & FINISHED:
        return
    is_all = show_all or bool(states)
    offset = 0
    while page := scheduler.queries.finished(_PAGE if is_all else RECENTLY_FINISHED, offset):
        yield from (job for job in page if job.state in wanted)
        offset += len(page)
        if not is_all:
            return


def _jobs_in_state(scheduler: SchedulerLoop, states: list[JobState]) -> Iterator[Job]:
    offset = 0
    while states and (page := scheduler.queries.in_state(states, _PAGE, offset)):
        yield from page
        offset += len(page)
