"""Jobs as they are asked for: a page of them, all about one, why it waits, what happened to it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from msgspec.structs import replace

from gpuyard.core.job.job import Attempt, Job
from gpuyard.core.job.lifecycle import FINISHED, JobState
from gpuyard.core.job.selection import parse_selection
from gpuyard.daemon.api import explain_wait, memory_estimates
from gpuyard.daemon.api.parameters import read_number, read_state, read_whole
from gpuyard.daemon.api.queue_status import standing
from gpuyard.daemon.api.read_in_thread import ThreadedReader
from gpuyard.daemon.api.wait_for_jobs import JobWaits
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.schema import job_json
from gpuyard.daemon.server.http_parser import HttpError, Request
from gpuyard.daemon.server.router import Answer, Routes
from gpuyard.errors import UserError
from gpuyard.store.job_search import RECENTLY_FINISHED, JobFilter, PageRange, SearchResult

MOST_ROWS = 10_000
LOOK_FOR_PEOPLE_S = 0.5
_LONGEST_WAIT_S = 30.0
_LONGEST_SEARCH = 1000
# As many are found without a thread, and so many rows made without others being served.
_AT_ONCE, _PIECE = 200, 10


class JobListHandler:
    def __init__(self, scheduler: SchedulerLoop, reader: ThreadedReader) -> None:
        self._scheduler = scheduler
        self._reader = reader

    def routes(self) -> Routes:
        return {
            ("GET", "/jobs"): self._jobs,
            ("GET", "/wait"): self._wait,
            ("GET", "/jobs/{id}"): self.of_job(self._show),
            ("GET", "/jobs/{id}/why"): self.of_job(self._why),
            ("GET", "/jobs/{id}/history"): self.of_job(self._history),
        }

    def of_job(
        self, view: Callable[[Job, Request], Answer | Awaitable[Answer]]
    ) -> Callable[[Request, int], Answer | Awaitable[Answer]]:
        return lambda request, job_id: view(self.job(job_id), request)

    def job(self, job_id: int) -> Job:
        job = self._scheduler.store.job(job_id)
        if job is None:
            raise HttpError(404, f"there is no job {job_id}", hint="`gpuyard queue --all` shows those there are")
        return job

    async def _jobs(self, request: Request) -> Answer:
        query = request.query
        limit = min(read_whole(query.get("limit"), 50), MOST_ROWS)
        offset = read_whole(query.get("after"), 0)
        order, show_all = query.get("order", "queue"), query.get("all") == "1"
        if order not in ("queue", "newest"):
            raise UserError(f"'{order[:20]}' is no order", hint="it can be queue or newest")
        ids = query.get("ids")
        ranges = tuple(self._scheduler.requests.stretches(parse_selection(ids))) if ids else None
        wanted = replace(read_wanted(query), ranges=ranges)
        if offset == 0 and limit <= _AT_ONCE and order == "queue" and _is_near(wanted):
            jobs = list(islice(explain_wait.Listing(self._scheduler).all(wanted.states, show_all=show_all), limit + 1))
            more, total = len(jobs) > limit, self._total(wanted, show_all=show_all)
            rows = await self._rows(jobs[:limit])
        else:
            found = await self._find(wanted, PageRange(offset=offset, count=limit + 1), order, show_all=show_all)
            more, total = len(found.ids) > limit, found.total
            rows = await self._rows(self._still(found.ids[:limit], wanted))
        return {"jobs": rows, **standing(self._scheduler), "next": offset + limit if more else None, "total": total}

    async def _find(self, wanted: JobFilter, place: PageRange, order: str, *, show_all: bool) -> SearchResult:
        if order == "newest":
            return await self._reader.search(lambda search: search.newest(wanted, place))
        now = self._scheduler.sampling.now()
        used = self._scheduler.controller.transitions.used(now)
        return await self._reader.search(lambda search: search.page(wanted, used, now, place, show_all=show_all))

    def _still(self, ids: Sequence[int], wanted: JobFilter) -> Iterator[Job]:
        """Those that are still there, and as they were asked for: something may have happened since they were found."""
        for job_id in ids:
            job = self._scheduler.store.job(job_id)
            if job is not None and (not wanted.states or job.state in wanted.states):
                yield job

    def _total(self, wanted: JobFilter, *, show_all: bool) -> int | None:
        """`None` where a submission is on its way: its jobs are not there yet, and are counted."""
        if self._scheduler.store.has_arriving:
            return None
        counts = self._scheduler.store.counts()
        states = wanted.states or tuple(JobState)
        finished = sum(counts[state] for state in states if state in FINISHED)
        if not show_all and not wanted.states:
            finished = min(finished, RECENTLY_FINISHED)
        return finished + sum(counts[state] for state in states if state not in FINISHED)

    async def _rows(self, jobs: Iterable[Job]) -> list[Answer]:
        """A few at a time: others are served in between."""
        rows = []
        for place, job in enumerate(jobs):
            if place and place % _PIECE == 0:
                await asyncio.sleep(0)
            rows.append({**self.row(job), "reason": explain_wait.in_brief(self._scheduler, job)})
        return rows

    def row(self, job: Job) -> Answer:
        need, snapshot = memory_estimates.next_need(self._scheduler, job), self._scheduler.sampling.latest.snapshot
        return job_json.row(job, self._last_attempt(job), need, snapshot, time.time())

    def _last_attempt(self, job: Job) -> Attempt | None:
        live = self._scheduler.controller.transitions.live.get(job.id)
        if live is not None:
            return live.attempt
        attempts = self._scheduler.store.attempts(job.id) if job.attempts else []
        return attempts[-1] if attempts else None

    def _show(self, job: Job, request: Request) -> Answer:
        scheduler = self._scheduler
        attempts, after = self.attempts(job), scheduler.store.dependencies(job.id)
        with_environment = request.query.get("environment") == "1"
        return {
            **self.row(job),
            **job_json.details(job, attempts, after, with_environment=with_environment, now=time.time()),
            "memory": memory_estimates.memory(scheduler, job),
            "advice": memory_estimates.advice(scheduler, job, attempts),
        }

    def attempts(self, job: Job) -> list[Attempt]:
        """Each with the program's own pid; one that lives with what it was last seen to use."""
        live = self._scheduler.controller.transitions.live.get(job.id)
        found = [each for each in self._scheduler.store.attempts(job.id) if live is None or each.ended_at is not None]
        return found if live is None else [*found, self._scheduler.with_own_pid(live.attempt)]

    async def _why(self, job: Job, _: Request) -> Answer:
        await self._scheduler.sampling.fresh(LOOK_FOR_PEOPLE_S)
        return explain_wait.why(self._scheduler, job)

    def _history(self, job: Job, _: Request) -> Answer:
        events = explain_wait.story(job, self.attempts(job), self._scheduler.queries.events(job.id))
        return {"id": job.id, "events": events}

    async def _wait(self, request: Request) -> Answer:
        scheduler, text = self._scheduler, request.query.get("ids", "")
        ranges = scheduler.requests.stretches(parse_selection(text)) if text else scheduler.queries.unfinished()
        waiting = JobWaits(scheduler.queries, scheduler.store, ranges)
        await scheduler.finish_signal.wait(
            waiting, min(_LONGEST_WAIT_S, read_number(request.query.get("timeout"), _LONGEST_WAIT_S))
        )
        return waiting.answer()


def read_wanted(query: Mapping[str, str]) -> JobFilter:
    """Which jobs are asked for, but for their ids."""
    return JobFilter(
        states=tuple(read_state(word) for word in query.get("state", "").split(",") if word),
        search=query.get("search", "").strip()[:_LONGEST_SEARCH],
        tag=query.get("tag", ""),
        user=query.get("user", ""),
    )


def _is_near(wanted: JobFilter) -> bool:
    """Whether the first of them are found at once: not where they are few among many that have finished."""
    finished = FINISHED & set(wanted.states)
    return wanted.is_plain and (not finished or finished == FINISHED)
