"""Routes for job logs: the end of a log, or a stream of it as it is written, from one attempt to the next.

Logs are read in threads of their own: logs of cluster jobs are on network file systems that may hang.
"""

import asyncio
import codecs
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from msgspec import Struct

from gpuyard.daemon.api.jobs import find_job
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.server.event_stream import HEARTBEAT, HEARTBEAT_S
from gpuyard.daemon.server.http_messages import HttpError, ResponseStream, StreamClient
from gpuyard.engines.common.job_logs import open_log
from gpuyard.model.job import Attempt
from gpuyard.model.lifecycle import FINISHED
from gpuyard.schema.jobs import LogEvent, LogTail
from gpuyard.schema.requests import LogQuery

_log = logging.getLogger(__name__)
# The most bytes of one event: as JSON it may be six times as long, and the viewer must buffer it.
_PIECE = 65_536
# A viewer that is further behind than this skips to the end.
_FAR_BEHIND = 1_048_576


class LogChunk(Struct, frozen=True, kw_only=True):
    """Bytes of a log; `ends` is the offset behind them in everything that the attempt has written."""

    data: bytes = b""
    ends: int = 0
    is_cut: bool = False

    def text_bytes(self) -> bytes:
        """Leave out the rest of a UTF-8 character whose first bytes were cut off."""
        if not self.is_cut:
            return self.data
        return self.data[next((place for place, byte in enumerate(self.data[:4]) if byte & 0xC0 != 0x80), 0) :]


class JobLogs:
    def __init__(self, scheduler: SchedulerLoop) -> None:
        self._scheduler = scheduler
        self.attempts = scheduler.store.attempts
        self._threads = ThreadPoolExecutor(4, "gpuyard-logs")

    async def tail(self, job_id: int, query: LogQuery) -> LogTail:
        attempt = self._find_attempt(job_id, query)
        # Before the log is read: the text has all that was written until then.
        is_over = self.is_over(job_id, attempt)
        tail = min(query.tail, 4 * 1_048_576)
        chunks = [await self.read(_file_of(attempt, stream), None, tail, tail) for stream in _streams(query)]
        return LogTail(
            id=job_id,
            attempt=attempt.number if attempt is not None else None,
            text="".join(chunk.text_bytes().decode(errors="replace") for chunk in chunks),
            is_cut=any(chunk.is_cut for chunk in chunks),
            is_over=is_over,
        )

    def live(self, job_id: int, query: LogQuery) -> ResponseStream:
        attempt = self._find_attempt(job_id, query)
        return ResponseStream(start=lambda viewer: _Follower(self, viewer, job_id, attempt, query).begin())

    async def read(self, log: str | None, at: int | None, tail: int, most: int) -> LogChunk:
        """Read up to `most` bytes from offset `at` on, or the last `tail` bytes if `at` is None."""
        if log is None:
            return LogChunk()
        return await asyncio.get_running_loop().run_in_executor(self._threads, read_piece, Path(log), at, tail, most)

    def _find_attempt(self, job_id: int, query: LogQuery) -> Attempt | None:
        """Return the attempt with this number, or the last one; None for a job that was never started."""
        find_job(self._scheduler, job_id)
        attempts, number = self.attempts(job_id), query.attempt
        found = next((attempt for attempt in reversed(attempts) if number in (None, attempt.number)), None)
        if found is None and number is not None:
            raise HttpError(404, f"job {job_id} has no attempt {number}", hint=f"it had {len(attempts)}")
        if found is not None and query.stream == "stderr" and found.error_log is None:
            message = f"the standard error of job {job_id} is in the same log as its output"
            raise HttpError(409, message, hint="submit it with --split-stderr or --error to tell them apart")
        return found

    def is_over(self, job_id: int, attempt: Attempt | None) -> bool:
        """Return whether the attempt has ended; None: the job, which was never started."""
        if attempt is None:
            job = self._scheduler.store.job(job_id)
            return job is None or job.state in FINISHED
        live = self._scheduler.controller.transitions.live.get(job_id)
        return live is None or live.attempt.number != attempt.number


class _StreamPosition:
    """How far one stream of an attempt was read; None before its tail was."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.at: int | None = None
        self.letters = codecs.getincrementaldecoder("utf-8")("replace")


class _Follower:
    """Streams one job's log to one viewer; after the last attempt it waits for the next one."""

    def __init__(
        self, logs: JobLogs, viewer: StreamClient, job_id: int, attempt: Attempt | None, query: LogQuery
    ) -> None:
        self._logs, self._viewer, self._job_id, self._attempt = logs, viewer, job_id, attempt
        self._tail = min(query.tail, _FAR_BEHIND)
        self._positions = [_StreamPosition(stream) for stream in _streams(query)]

    def begin(self) -> Callable[[], object]:
        task = asyncio.ensure_future(self._follow())
        task.add_done_callback(self._done)
        return task.cancel

    def _done(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the log of job %d cannot be followed", self._job_id, exc_info=error)
            self._send(LogEvent(error=str(error)))
            self._viewer.end()

    async def _follow(self) -> None:
        loop = asyncio.get_running_loop()
        attempts = self._logs.attempts(self._job_id)
        is_last = self._attempt is None or not attempts or self._attempt.number >= attempts[-1].number
        spoke_at = loop.time()
        while True:
            # Before the log is read: what was written until then still has to be sent.
            ends_here = self._attempt is None or self._logs.is_over(self._job_id, self._attempt)
            if any([await self._send_from(position) for position in self._positions]):
                spoke_at = loop.time()
                await asyncio.sleep(0.1)
                continue
            if ends_here and not self._continues(is_last=is_last):
                self._send(LogEvent(over=True))
                self._viewer.end()
                return
            if loop.time() > spoke_at + HEARTBEAT_S:
                spoke_at = loop.time()
                self._viewer.send(HEARTBEAT)
            await asyncio.sleep(0.25)

    async def _send_from(self, read: _StreamPosition) -> bool:
        """Return whether a full piece was read: there may be more."""
        piece = await self._logs.read(_file_of(self._attempt, read.stream), read.at, self._tail, _PIECE)
        if piece.is_cut and read.at is not None:
            read.letters.reset()
            self._send(LogEvent(cut=True))
        read.at = piece.ends
        if text := read.letters.decode(piece.text_bytes()):
            self._send(LogEvent(text=text, is_stderr=read is not self._positions[0]))
        return len(piece.data) == _PIECE

    def _continues(self, *, is_last: bool) -> bool:
        """Go on to the next attempt. Return whether there is one, or may be one later."""
        attempts = self._logs.attempts(self._job_id) if is_last else []
        number = self._attempt.number if self._attempt is not None else 0
        following = next((each for each in attempts if each.number > number), None)
        if following is None:
            return is_last and not self._logs.is_over(self._job_id, None)
        for read in self._positions:
            if _file_of(following, read.stream) != _file_of(self._attempt, read.stream):
                read.at = 0
            read.letters.reset()
        self._attempt = following
        self._send(LogEvent(attempt=following.number))
        return True

    def _send(self, event: LogEvent) -> None:
        self._viewer.send(b"data: %b\n\n" % msgspec.json.encode(event))


def _streams(query: LogQuery) -> tuple[str, ...]:
    return ("stdout", "stderr") if query.stream == "both" else (query.stream,)


def _file_of(attempt: Attempt | None, stream: str) -> str | None:
    if attempt is None:
        return None
    return attempt.error_log if stream == "stderr" else attempt.log


def read_piece(path: Path, at: int | None, tail: int, most: int) -> LogChunk:
    """Read up to `most` bytes from offset `at` on; the last `tail` bytes if `at` is None, or too far behind the end."""
    try:
        with open_log(path) as log:
            end = log.end
            is_outdated = at is not None and (end - at > _FAR_BEHIND or log.after_hole(at) != at)
            begins = max(log.first, end - tail) if at is None or is_outdated else at
            data = b"".join(log.read_all(begins, min(end, begins + most)))
            return LogChunk(data=data, ends=begins + len(data), is_cut=is_outdated or (at is None and begins > 0))
    except FileNotFoundError:
        return LogChunk(ends=at or 0)
