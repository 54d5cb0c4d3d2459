"""What a job wrote: the end of it, or all that follows as it is written, from one attempt to the next.

Logs are read in threads of their own: those of jobs elsewhere are on file systems that may not answer for a while.
"""

import asyncio
import codecs
import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import Struct

from gpuyard.core.job.job import Attempt
from gpuyard.core.job.lifecycle import FINISHED
from gpuyard.daemon.api.parameters import read_whole
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.server.http_parser import HttpError, Request, ResponseStream, StreamClient
from gpuyard.daemon.server.router import Answer, Routes
from gpuyard.engines.local.job_logs import Kept

_log = logging.getLogger(__name__)
_TAIL = 65_536
_MOST = 4 * 1_048_576
_MOST_LIVE = 262_144
# Of what is sent at once: written as JSON it may be six times as long, and a viewer has to take it in.
_PIECE = 65_536
_BETWEEN_PIECES_S = 0.1
# Whoever has fallen behind by more than this is told the end of it instead.
_FAR_BEHIND = 1_048_576
_EVERY_S = 0.25
_HEARTBEAT_S = 15.0
_THREADS = 4


class LogChunk(Struct, frozen=True, kw_only=True):
    """Bytes of a log, and the place behind them, counted from the beginning of all that was ever written."""

    data: bytes = b""
    ends: int = 0
    is_cut: bool = False


class JobLogs:
    def __init__(self, scheduler: SchedulerLoop) -> None:
        self._scheduler = scheduler
        self._threads = ThreadPoolExecutor(_THREADS, "gpuyard-logs")

    def routes(self) -> Routes:
        return {("GET", "/jobs/{id}/log"): self._tail, ("GET", "/jobs/{id}/log/live"): self._live}

    async def _tail(self, request: Request, job_id: int) -> Answer:
        attempt = self._attempt(job_id, read_whole(request.query.get("attempt"), 0))
        is_over = self._is_over(job_id, attempt)  # asked before: what was written until then is in the text
        tail = min(read_whole(request.query.get("tail"), _TAIL), _MOST)
        piece = await self.read(attempt, None, tail, tail)
        return {
            "id": job_id,
            "attempt": attempt.number if attempt is not None else None,
            "text": _whole_letters(piece).decode(errors="replace"),
            "is_cut": piece.is_cut,
            "is_over": is_over,
        }

    def _live(self, request: Request, job_id: int) -> ResponseStream:
        tail = min(read_whole(request.query.get("tail"), _TAIL), _MOST_LIVE)
        attempt = self._attempt(job_id, read_whole(request.query.get("attempt"), 0))
        return ResponseStream(start=lambda viewer: _Follower(self, viewer, job_id, attempt, tail).begin())

    async def read(self, attempt: Attempt | None, at: int | None, tail: int, most: int) -> LogChunk:
        """So much from there on, or from where its last part begins."""
        if attempt is None or attempt.log is None:
            return LogChunk()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, read_piece, Path(attempt.log), at, tail, most)

    def _attempt(self, job_id: int, number: int) -> Attempt | None:
        """The one of that number, or the last; `None` for a job that has none yet."""
        if self._scheduler.store.job(job_id) is None:
            raise HttpError(404, f"there is no job {job_id}", hint="`gpuyard queue --all` shows those there are")
        attempts = self.attempts(job_id)
        if not number:
            return attempts[-1] if attempts else None
        found = next((attempt for attempt in attempts if attempt.number == number), None)
        if found is None:
            raise HttpError(404, f"job {job_id} has no attempt {number}", hint=f"it has had {len(attempts)}")
        return found

    def attempts(self, job_id: int) -> list[Attempt]:
        return self._scheduler.store.attempts(job_id)

    def is_live(self, job_id: int, attempt: Attempt) -> bool:
        live = self._scheduler.controller.transitions.live.get(job_id)
        return live is not None and live.attempt.number == attempt.number

    def is_finished(self, job_id: int) -> bool:
        job = self._scheduler.store.job(job_id)
        return job is None or job.state in FINISHED

    def _is_over(self, job_id: int, attempt: Attempt | None) -> bool:
        return self.is_finished(job_id) if attempt is None else not self.is_live(job_id, attempt)


class _Follower:
    """One viewer of one job's log; it goes on to the next attempt if it began with the last."""

    def __init__(self, logs: JobLogs, viewer: StreamClient, job_id: int, attempt: Attempt | None, tail: int) -> None:
        self._logs = logs
        self._viewer = viewer
        self._job_id = job_id
        self._attempt = attempt
        self._tail = tail
        self._at: int | None = None
        self._letters = codecs.getincrementaldecoder("utf-8")("replace")

    def begin(self) -> Callable[[], None]:
        task = asyncio.ensure_future(self._follow())
        task.add_done_callback(self._done)
        return lambda: _cancel(task)

    def _done(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the log of job %d cannot be followed", self._job_id, exc_info=error)
            self._send({"error": str(error), "hint": None})
            self._viewer.end()

    async def _follow(self) -> None:
        loop = asyncio.get_running_loop()
        attempts = self._logs.attempts(self._job_id)
        is_last = self._attempt is None or not attempts or self._attempt.number >= attempts[-1].number
        spoke_at = loop.time()
        while True:
            # Asked before: what was written until then is still to be read.
            ends_here = self._attempt is None or not self._logs.is_live(self._job_id, self._attempt)
            if await self._tell():
                spoke_at = loop.time()
                await asyncio.sleep(_BETWEEN_PIECES_S)
                continue
            if ends_here and not self._goes_on(is_last=is_last):
                self._send({"over": True})
                self._viewer.end()
                return
            if loop.time() > spoke_at + _HEARTBEAT_S:
                spoke_at = loop.time()
                self._viewer.send(b": still here\n\n")
            await asyncio.sleep(_EVERY_S)

    async def _tell(self) -> bool:
        """Whether it came across a whole piece: there may be more."""
        piece = await self._logs.read(self._attempt, self._at, self._tail, _PIECE)
        if piece.is_cut and self._at is not None:
            self._letters.reset()
            self._send({"cut": True})
        data = _whole_letters(piece) if piece.is_cut else piece.data
        self._at = piece.ends
        if text := self._letters.decode(data):
            self._send({"text": text})
        return len(piece.data) == _PIECE

    def _goes_on(self, *, is_last: bool) -> bool:
        """Whether there is more to come: of another attempt, now or some time."""
        attempts = self._logs.attempts(self._job_id) if is_last else []
        number = self._attempt.number if self._attempt is not None else 0
        following = next((each for each in attempts if each.number > number), None)
        if following is None:
            return is_last and not self._logs.is_finished(self._job_id)
        self._attempt, self._at = following, 0
        self._letters.reset()
        self._send({"attempt": following.number})
        return True

    def _send(self, told: Answer) -> None:
        self._viewer.send(b"data: %b\n\n" % json.dumps(told).encode())


def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()


def read_piece(path: Path, at: int | None, tail: int, most: int) -> LogChunk:
    """So much of a log from there on; from where its last part begins where nobody has read any of it yet, or whoever
    has is far behind."""
    try:
        with Kept(path) as kept:
            end = kept.end
            is_outdated = at is not None and (end - at > _FAR_BEHIND or at < kept.first)
            begins = max(kept.first, end - tail) if at is None or is_outdated else at
            data = b"".join(kept.read_all(begins, min(end, begins + most)))
            return LogChunk(data=data, ends=begins + len(data), is_cut=is_outdated or (at is None and begins > 0))
    except FileNotFoundError:
        return LogChunk(ends=at or 0)


def _whole_letters(piece: LogChunk) -> bytes:
    """Without the rest of a letter that was cut through."""
    if not piece.is_cut:
        return piece.data
    start = next((place for place, byte in enumerate(piece.data[:4]) if byte & 0xC0 != 0x80), 0)
    return piece.data[start:]
