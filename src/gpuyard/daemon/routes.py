"""The daemon's routes: what can be asked over the socket, by the command line, by a page, by `curl`."""

import asyncio
import contextlib
import itertools
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gpuyard.control.requests import Changed, InPieces, fit_to_machine
from gpuyard.core.jobs import Attempt, Job, Parked
from gpuyard.core.lifecycle import JobState
from gpuyard.core.selection import Selection, format_ids, parse_selection
from gpuyard.core.shape import iso_time
from gpuyard.core.submission import Submission, decode_asked, parse_submission
from gpuyard.core.units import parse_duration
from gpuyard.daemon import batches, exporting, learned, places, shape, tasks, telling
from gpuyard.daemon.http import Refused, Request, Response
from gpuyard.daemon.reading import (
    read_body,
    read_number,
    read_priority,
    read_selection,
    read_state,
    read_tag,
    read_whole,
    read_words,
)
from gpuyard.daemon.waiting import Waiting
from gpuyard.daemon.yard import Yard, banned_devices
from gpuyard.engines.logs import path_of, remove_logs
from gpuyard.engines.registry import LOCAL, check_name, log_folders
from gpuyard.errors import EnvironmentFault, StoreFault, UserError
from gpuyard.leases.identity import user_name
from gpuyard.store.database import faults_told
from gpuyard.version import __version__

T = TypeVar("T")
Answer = dict[str, Any]

_LONGEST_WAIT_S = 30.0
_LOOK_FOR_SUBMIT_S = 10.0
_LOOK_FOR_PEOPLE_S = 0.5
_MOST_ROWS = 10_000
_LONG_BODY = 256 * 1024


class Routes:
    def __init__(self, yard: Yard, stop: Callable[[], None], started_at: float) -> None:
        self._yard = yard
        self._stop = stop
        self._started_at = started_at
        self._user = user_name(os.getuid())
        self._arriving: dict[str, asyncio.Task[Answer]] = {}
        self._routes: dict[tuple[str, str], Callable[[Request], Answer | Awaitable[Answer]]] = {
            ("GET", "/status"): self._status,
            ("GET", "/jobs"): self._jobs,
            ("GET", "/wait"): self._wait,
            ("POST", "/submissions"): self._submit,
            ("POST", "/jobs/cancel"): self._change(yard.requests.cancel),
            ("POST", "/jobs/hold"): self._change(yard.requests.hold),
            ("POST", "/jobs/release"): self._change(yard.requests.release),
            ("POST", "/jobs/retry"): self._change(yard.requests.retry),
            ("POST", "/jobs/suspend"): self._suspend,
            ("POST", "/jobs/resume"): self._change(yard.requests.resume),
            ("POST", "/jobs/priority"): self._priority,
            ("POST", "/pause"): lambda _: self._pause(paused=True),
            ("POST", "/unpause"): lambda _: self._pause(paused=False),
            ("POST", "/drain"): lambda _: self._pause(paused=True, draining=True),
            ("POST", "/clean"): self._clean,
            ("POST", "/stop"): self._end,
            ("GET", "/tasks"): lambda asked: tasks.standing(yard, read_tag(asked.query)),
            ("POST", "/tags/stop"): lambda asked: self._stop_tag(read_tag(read_body(asked)), stopped=True),
            ("POST", "/tags/go"): lambda asked: self._stop_tag(read_tag(read_body(asked)), stopped=False),
            ("GET", "/exports"): lambda asked: exporting.page(
                yard, asked.query.get("ids", ""), after=read_whole(asked.query.get("after"), 0)
            ),
            ("GET", "/estimates"): self._estimates,
            ("POST", "/estimates/forget"): lambda asked: learned.forget(yard, read_words(read_body(asked))),
        }

    def handle(self, request: Request) -> Response | Awaitable[Response]:
        with self._damage_noticed():
            route = self._routes.get((request.method, request.path)) or self._route_of_one(request)
            answer = route(request)
        return _as_json(answer) if isinstance(answer, dict) else self._later(answer)

    async def _later(self, answer: Awaitable[Answer]) -> Response:
        with self._damage_noticed():
            return _as_json(await answer)

    @contextlib.contextmanager
    def _damage_noticed(self) -> Iterator[None]:
        """A damaged database ends the daemon wherever it shows first."""
        try:
            with faults_told():
                yield
        except StoreFault as error:
            if error.is_damage:
                self._yard.give_up(error)
            raise

    def _route_of_one(self, request: Request) -> Callable[[Request], Answer | Awaitable[Answer]]:
        """`/jobs/17`, `/jobs/17/why`, `/jobs/17/story`; `/batches/17`, `/batches/17/runs`."""
        words = request.path.strip("/").split("/")
        if words[0] == "batches" and 2 <= len(words) <= 3 and words[1].isdecimal() and request.method == "GET":
            return self._route_of_batch(int(words[1]), words[2:])
        known: dict[str, Callable[[Job, Request], Answer | Awaitable[Answer]]] = {
            "": self._show,
            "why": self._why,
            "story": self._story,
        }
        is_known_path = any(path == request.path for _, path in self._routes)
        view = words[2] if len(words) == 3 else ""
        if words[0] != "jobs" or not 2 <= len(words) <= 3 or view not in known or is_known_path:
            status = 405 if is_known_path else 404
            raise Refused(status, f"there is no {request.method} {request.path}", hint="see the reference on routes")
        if request.method != "GET":
            raise Refused(405, f"{request.path} is only there to be read")
        if not words[1].isdecimal() or (job := self._yard.store.job(int(words[1]))) is None:
            raise Refused(404, f"there is no job {words[1]}", hint="`gpuyard queue --all` shows those there are")
        return lambda asked: known[view](job, asked)

    def _route_of_batch(self, first_id: int, view: list[str]) -> Callable[[Request], Answer]:
        if not view:
            return lambda _: batches.standing(self._yard, first_id)
        if view != ["runs"]:
            raise Refused(404, f"a batch has no {view[0]}", hint="see the reference on routes")
        return lambda asked: batches.runs(
            self._yard,
            first_id,
            after=read_whole(asked.query.get("after"), 0),
            limit=max(1, min(read_whole(asked.query.get("limit"), 1000), _MOST_ROWS)),
        )

    # The queue as a whole

    def _status(self, _: Request) -> Answer:
        yard = self._yard
        return {
            "pid": os.getpid(),
            "version": __version__,
            "started_at": iso_time(self._started_at),
            "uptime_s": time.time() - self._started_at,
            "socket": places.socket_path(),
            "state_dir": places.state_folder(),
            **self._standing(),
            "under_way": self._under_way(),
            "step_us": None if yard.step_s is None else yard.step_s * 1e6,
            "notices": [*yard.notices, *([yard.trouble] if yard.trouble else [])],
        }

    def _standing(self) -> Answer:
        store = self._yard.store
        return {
            "paused": bool(store.setting("paused")),
            "draining": bool(store.setting("draining")),
            "counts": {str(state): count for state, count in store.counts().items()},
        }

    def _pause(self, *, paused: bool, draining: bool = False) -> Answer:
        self._yard.requests.set_paused(paused=paused, draining=draining)
        self._yard.wake()
        return {**self._standing(), "running": self._under_way()}

    def _stop_tag(self, tag: str, *, stopped: bool) -> Answer:
        self._yard.requests.set_stopped(tag, stopped=stopped)
        self._yard.wake()
        return {"tag": tag, "stopped": stopped}

    def _end(self, _: Request) -> Answer:
        asyncio.get_running_loop().call_soon(self._stop)
        return {"stopping": True, "running": self._under_way()}

    def _under_way(self) -> int:
        """How many come to their end by themselves: not those that were suspended by hand."""
        live = self._yard.controller.desk.live.values()
        return sum(
            each.job.state is not JobState.SUSPENDED or each.attempt.parked is not Parked.BY_PERSON for each in live
        )

    async def _clean(self, request: Request) -> Answer:
        older_than_s = read_body(request).get("older_than_s")
        if isinstance(older_than_s, str):
            older_than_s = parse_duration(older_than_s)
        if not isinstance(older_than_s, int | float) or older_than_s < 0:
            raise UserError("older_than_s is missing", hint="say how old they have to be, such as 30d")
        gone = await _in_pieces(self._yard.requests.clean(float(older_than_s)))
        folders = log_folders(Path(places.state_folder()))
        freed = await asyncio.get_running_loop().run_in_executor(None, _remove_logs, folders, gone)
        return {"jobs": len(gone), "bytes": freed}

    # Submit and change

    async def _submit(self, request: Request) -> Answer:
        loop = asyncio.get_running_loop()
        # To read a file of a hundred thousand commands takes seconds, in which others are served.
        is_long = len(request.body) > _LONG_BODY
        engine = self._yard.controller.rules.engine
        submission = (
            await loop.run_in_executor(None, _read, request.body, engine) if is_long else _read(request.body, engine)
        )
        token = submission.token
        task = self._arriving.get(token) if token else None
        if task is None:
            task = loop.create_task(self._take_in(submission))
            if token:
                self._arriving[token] = task
                task.add_done_callback(lambda _: self._arriving.pop(token, None))
        return await asyncio.shield(task)  # a client that goes away does not leave half a submission behind

    async def _take_in(self, submission: Submission) -> Answer:
        yard = self._yard
        is_new = not submission.token or yard.store.submitted(submission.token) is None
        if is_new and submission.spec.need.devices:
            look = await yard.looks.fresh(_LOOK_FOR_SUBMIT_S)
            submission = fit_to_machine(submission, look.snapshot, banned_devices(look.snapshot))
        first, last = await _in_pieces(yard.requests.submit(submission, self._user))
        yard.wake()
        job = yard.store.job(first)
        notes = ["the queue is paused: `gpuyard unpause` lets it go on"] if yard.store.setting("paused") else []
        if job is not None and job.state is JobState.REJECTED:
            notes.append(f"it will never start: {job.reason}")
        ids = str(first) if first == last else f"{first}-{last}"
        return {"ids": ids, "first": first, "last": last, "count": last - first + 1, "notes": notes}

    def _change(self, act: Callable[[Selection], InPieces[Changed]]) -> Callable[[Request], Awaitable[Answer]]:
        return lambda request: self._do(act(read_selection(read_body(request).get("ids"))))

    async def _suspend(self, request: Request) -> Answer:
        selection = read_selection(read_body(request).get("ids"))
        look = await self._yard.looks.fresh(_LOOK_FOR_PEOPLE_S)
        return await self._do(self._yard.requests.suspend(selection, look))

    def _priority(self, request: Request) -> Awaitable[Answer]:
        body = read_body(request)
        priority = read_priority(body)
        return self._do(self._yard.requests.prioritise(read_selection(body.get("ids")), priority))

    async def _do(self, changing: InPieces[Changed]) -> Answer:
        changed = await _in_pieces(changing)
        self._yard.finishing.tell()
        self._yard.wake()
        return {
            "changed": format_ids(changed.ids),
            "count": len(changed.ids),
            "unchanged": [msgspec.to_builtins(refused) for refused in changed.unchanged[:100]],
            "unchanged_count": len(changed.unchanged),
        }

    # Read

    def _jobs(self, request: Request) -> Answer:
        query = request.query
        limit = min(read_whole(query.get("limit"), 50), _MOST_ROWS)
        offset = read_whole(query.get("after"), 0)
        states = [read_state(word) for word in query.get("state", "").split(",") if word]
        jobs = self._listed(query.get("ids"), states, show_all=query.get("all") == "1")
        page = list(_slice(jobs, offset, limit + 1))
        more = len(page) > limit
        rows = [{**self._row(job), "reason": telling.in_brief(self._yard, job)} for job in page[:limit]]
        return {"jobs": rows, **self._standing(), "next": offset + limit if more else None}

    def _listed(self, ids: str | None, states: list[JobState], *, show_all: bool) -> Iterator[Job]:
        listing = telling.Listing(self._yard)
        if ids:
            ranges = self._yard.requests.stretches(parse_selection(ids))
            return listing.of_ids(ranges, states or None)
        return listing.all(states or None, show_all=show_all)

    def _row(self, job: Job) -> Answer:
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
        attempts, after = self._attempts(job), yard.store.dependencies(job.id)
        with_environment = request.query.get("environment") == "1"
        return {
            **self._row(job),
            **shape.details(job, attempts, after, with_environment=with_environment, now=time.time()),
            "memory": learned.memory(yard, job),
            "advice": learned.advice(yard, job, attempts),
        }

    def _attempts(self, job: Job) -> list[Attempt]:
        """Each with the program's own pid; one that lives with what it was last seen to use."""
        live = self._yard.controller.desk.live.get(job.id)
        found = [each for each in self._yard.store.attempts(job.id) if live is None or each.ended_at is not None]
        return found if live is None else [*found, self._yard.with_own_pid(live.attempt)]

    def _estimates(self, request: Request) -> Answer:
        return learned.estimates(self._yard, min(read_whole(request.query.get("limit"), 50), _MOST_ROWS))

    async def _why(self, job: Job, _: Request) -> Answer:
        await self._yard.looks.fresh(_LOOK_FOR_PEOPLE_S)
        return telling.why(self._yard, job)

    def _story(self, job: Job, _: Request) -> Answer:
        events = telling.story(job, self._attempts(job), self._yard.catalogue.story(job.id))
        return {"id": job.id, "events": events}

    async def _wait(self, request: Request) -> Answer:
        yard, text = self._yard, request.query.get("ids", "")
        ranges = yard.requests.stretches(parse_selection(text)) if text else yard.catalogue.unfinished()
        waiting = Waiting(yard.catalogue, yard.store, ranges)
        await yard.finishing.wait(
            waiting, min(_LONGEST_WAIT_S, read_number(request.query.get("timeout"), _LONGEST_WAIT_S))
        )
        return waiting.answer()


def _read(body: bytes, engine: str) -> Submission:
    """`engine` is for those that name none; batches are paced by what this machine bears, and stay here."""
    asked = decode_asked(body)
    if "engine" not in asked.options and "concurrency" not in asked.options:
        asked.options["engine"] = engine
    submission = parse_submission(asked)
    check_name(submission.spec.engine or LOCAL)
    return submission


async def _in_pieces(pieces: InPieces[T]) -> T:
    """Does it piece by piece; others are served in between."""
    while True:
        try:
            next(pieces)
        except StopIteration as done:
            result: T = done.value
            return result
        await asyncio.sleep(0)


def _as_json(answer: Answer) -> Response:
    return Response(body=json.dumps(answer).encode())


def _slice(jobs: Iterator[Job], offset: int, count: int) -> Iterator[Job]:
    for place, job in enumerate(jobs):
        if place >= offset + count:
            return
        if place >= offset:
            yield job


def _remove_logs(folders: list[Path], gone: list[tuple[int, int]]) -> int:
    freed = 0
    for folder, (job_id, attempts) in itertools.product(folders, gone):
        for attempt in range(1, attempts + 1):
            path = path_of(folder, job_id, attempt)
            try:
                freed += path.stat().st_size
                remove_logs(folder, job_id, attempt)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise EnvironmentFault(f"{path} cannot be removed: {error.strerror}") from error
    return freed
