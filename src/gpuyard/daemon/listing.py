"""Jobs as they are asked for: a page of them, all about one, why it waits, what happened to it."""

import time
from collections.abc import Awaitable, Callable, Iterator

from gpuyard.core.jobs import Attempt, Job
from gpuyard.core.lifecycle import JobState
from gpuyard.core.selection import parse_selection
from gpuyard.daemon import learned, shape, telling
from gpuyard.daemon.http import Refused, Request
from gpuyard.daemon.reading import read_number, read_state, read_whole
from gpuyard.daemon.routing import Answer, Routes
from gpuyard.daemon.standing import standing
from gpuyard.daemon.waiting import Waiting
from gpuyard.daemon.yard import Yard

MOST_ROWS = 10_000
LOOK_FOR_PEOPLE_S = 0.5
_LONGEST_WAIT_S = 30.0


class Lists:
    def __init__(self, yard: Yard) -> None:
        self._yard = yard

    def routes(self) -> Routes:
        return {
            ("GET", "/jobs"): self._jobs,
            ("GET", "/wait"): self._wait,
            ("GET", "/jobs/{id}"): self.of_job(self._show),
            ("GET", "/jobs/{id}/why"): self.of_job(self._why),
            ("GET", "/jobs/{id}/story"): self.of_job(self._story),
        }

    def of_job(
        self, view: Callable[[Job, Request], Answer | Awaitable[Answer]]
    ) -> Callable[[Request, int], Answer | Awaitable[Answer]]:
        return lambda request, job_id: view(self.job(job_id), request)

    def job(self, job_id: int) -> Job:
        job = self._yard.store.job(job_id)
        if job is None:
            raise Refused(404, f"there is no job {job_id}", hint="`gpuyard queue --all` shows those there are")
        return job

    def _jobs(self, request: Request) -> Answer:
        query = request.query
        limit = min(read_whole(query.get("limit"), 50), MOST_ROWS)
        offset = read_whole(query.get("after"), 0)
        states = [read_state(word) for word in query.get("state", "").split(",") if word]
        jobs = self._listed(query.get("ids"), states, show_all=query.get("all") == "1")
        page = list(_slice(jobs, offset, limit + 1))
        more = len(page) > limit
        rows = [{**self.row(job), "reason": telling.in_brief(self._yard, job)} for job in page[:limit]]
        return {"jobs": rows, **standing(self._yard), "next": offset + limit if more else None}

    def _listed(self, ids: str | None, states: list[JobState], *, show_all: bool) -> Iterator[Job]:
        listing = telling.Listing(self._yard)
        if ids:
            ranges = self._yard.requests.stretches(parse_selection(ids))
            return listing.of_ids(ranges, states or None)
        return listing.all(states or None, show_all=show_all)

    def row(self, job: Job) -> Answer:
        need, snapshot = learned.next_need(self._yard, job), self._yard.looks.latest.snapshot
        return shape.row(job, self._last_attempt(job), need, snapshot, time.time())

    def _last_attempt(self, job: Job) -> Attempt | None:
        live = self._yard.controller.desk.live.get(job.id)
        if live is not None:
            return live.attempt
        attempts = self._yard.store.attempts(job.id) if job.attempts else []
        return attempts[-1] if attempts else None

    def _show(self, job: Job, request: Request) -> Answer:
        yard = self._yard
        attempts, after = self.attempts(job), yard.store.dependencies(job.id)
        with_environment = request.query.get("environment") == "1"
        return {
            **self.row(job),
            **shape.details(job, attempts, after, with_environment=with_environment, now=time.time()),
            "memory": learned.memory(yard, job),
            "advice": learned.advice(yard, job, attempts),
        }

    def attempts(self, job: Job) -> list[Attempt]:
        """Each with the program's own pid; one that lives with what it was last seen to use."""
        live = self._yard.controller.desk.live.get(job.id)
        found = [each for each in self._yard.store.attempts(job.id) if live is None or each.ended_at is not None]
        return found if live is None else [*found, self._yard.with_own_pid(live.attempt)]

    async def _why(self, job: Job, _: Request) -> Answer:
        await self._yard.looks.fresh(LOOK_FOR_PEOPLE_S)
        return telling.why(self._yard, job)

    def _story(self, job: Job, _: Request) -> Answer:
        events = telling.story(job, self.attempts(job), self._yard.catalogue.story(job.id))
        return {"id": job.id, "events": events}

    async def _wait(self, request: Request) -> Answer:
        yard, text = self._yard, request.query.get("ids", "")
        ranges = yard.requests.stretches(parse_selection(text)) if text else yard.catalogue.unfinished()
        waiting = Waiting(yard.catalogue, yard.store, ranges)
        await yard.finishing.wait(
            waiting, min(_LONGEST_WAIT_S, read_number(request.query.get("timeout"), _LONGEST_WAIT_S))
        )
        return waiting.answer()


def _slice(jobs: Iterator[Job], offset: int, count: int) -> Iterator[Job]:
    for place, job in enumerate(jobs):
        if place >= offset + count:
            return
        if place >= offset:
            yield job
