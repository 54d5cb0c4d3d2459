"""What is submitted: read, fitted to the machine, and taken in once, however often it is sent."""

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gpuyard.control.user_requests import fit_to_machine
from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.job.resubmit import resubmission
from gpuyard.core.job.submission import Submission, SubmissionRequest, decode_asked, parse_submission, read_line
from gpuyard.daemon.api.parameters import read_body
from gpuyard.daemon.loop import SchedulerLoop, banned_devices
from gpuyard.daemon.notify.setup_warnings import cautions
from gpuyard.daemon.server.chunked_work import run_in_pieces
from gpuyard.daemon.server.http_parser import HttpError, Request
from gpuyard.daemon.server.router import Answer, Routes
from gpuyard.engines.registry import LOCAL, check_name
from gpuyard.errors import UserError
from gpuyard.system.process_identity import user_name

_LOOK_FOR_SUBMIT_S = 10.0
_LONG_BODY = 256 * 1024


class ResubmitBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job once more, with a command and options that are other than they were."""

    command: str | tuple[str, ...] | None = None
    options: dict[str, Any] = {}
    token: str = ""

    @property
    def words(self) -> tuple[str, ...] | None:
        return (read_line(self.command.strip()) if isinstance(self.command, str) else self.command) or None


class SubmissionHandler:
    def __init__(self, scheduler: SchedulerLoop) -> None:
        self._scheduler = scheduler
        self._user = user_name(os.getuid())
        self._arriving: dict[str, asyncio.Task[Answer]] = {}

    def routes(self) -> Routes:
        return {("POST", "/submissions"): self.submit, ("POST", "/jobs/{id}/resubmit"): self.resubmit}

    async def submit(self, request: Request) -> Answer:
        loop = asyncio.get_running_loop()
        # To read a file of a hundred thousand commands takes seconds, in which others are served.
        is_long = len(request.body) > _LONG_BODY
        engine = self._scheduler.controller.rules.engine
        submission = (
            await loop.run_in_executor(None, _read, request.body, engine) if is_long else _read(request.body, engine)
        )
        return await self.take(submission)

    async def resubmit(self, request: Request, job_id: int) -> Answer:
        job = self._scheduler.store.job(job_id)
        if job is None:
            raise HttpError(404, f"there is no job {job_id}", hint="`gpuyard queue --all` shows those there are")
        again = _read_again(request)
        submission = resubmission(job, again.words, again.options, again.token)
        check_name(submission.spec.engine or LOCAL)
        return await self.take(submission)

    async def take(self, submission: Submission) -> Answer:
        token = submission.token
        if not token.isprintable():
            raise UserError("the token takes plain text")
        task = self._arriving.get(token) if token else None
        if task is None:
            task = asyncio.get_running_loop().create_task(self._take_in(submission))
            if token:
                self._arriving[token] = task
                task.add_done_callback(lambda _: self._arriving.pop(token, None))
        return await asyncio.shield(task)  # a client that goes away does not leave half a submission behind

    async def _take_in(self, submission: Submission) -> Answer:
        scheduler = self._scheduler
        is_new = not submission.token or scheduler.store.find_submission(submission.token) is None
        pace = submission.spec.pace
        if is_new and (submission.spec.need.devices or (pace is not None and pace.gates_devices)):
            look = await scheduler.sampling.fresh(_LOOK_FOR_SUBMIT_S)
            submission = fit_to_machine(submission, look.snapshot, banned_devices(look.snapshot))
        first, last = await run_in_pieces(scheduler.requests.submit(submission, self._user))
        scheduler.wake()
        job = scheduler.store.job(first)
        notes = ["the queue is paused: `gpuyard unpause` lets it go on"] if scheduler.store.setting("paused") else []
        notes += cautions(submission.spec)
        if job is not None and job.state is JobState.REJECTED:
            notes.append(f"it will never start: {job.reason}")
        ids = str(first) if first == last else f"{first}-{last}"
        return {"ids": ids, "first": first, "last": last, "count": last - first + 1, "notes": notes}


def _read_again(request: Request) -> ResubmitBody:
    try:
        return msgspec.convert(read_body(request), ResubmitBody)
    except msgspec.ValidationError as error:
        raise UserError(f"what is to be changed cannot be understood: {error}") from error


def _read(body: bytes, engine: str) -> Submission:
    """`engine` is for those that name none; batches are paced by what this machine bears, and stay here."""
    asked = decode_asked(body)
    if "engine" not in asked.options and "concurrency" not in asked.options:
        asked.options["engine"] = engine
    submission = parse_submission(_placed(asked))
    check_name(submission.spec.engine or LOCAL)
    return submission


def _placed(asked: SubmissionRequest) -> SubmissionRequest:
    """From a page nobody is in a folder, and nobody has variables: they are the user's home, and the daemon's own."""
    environment = dict(os.environ) if asked.environment is None else asked.environment
    return replace(asked, cwd=asked.cwd or str(Path.home()), environment=environment)
