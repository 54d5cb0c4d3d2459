"""Streams from the daemon into the screen state: the machine, the visible rows, the log of the selected job.

Each is a stream of its own; only what is visible is requested. One that breaks is opened again with the next daemon."""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

from gpuyard.client import paths
from gpuyard.client.daemon_liveness import running_pid, silent
from gpuyard.client.fast_http import VERSION_FIELD, NoDaemon, connect, dial, read_answer, read_head, render_request
from gpuyard.client.retrying import has_crashed
from gpuyard.errors import EnvironmentFault, GpuyardError, UserError
from gpuyard.model.selection import format_ids
from gpuyard.ui.tui.job_actions import ActionNotice, failed
from gpuyard.ui.tui.screen_state import ScreenState
from gpuyard.ui.tui.terminal_text import LogText

Answer = dict[str, Any]
_ANSWER_S = 10.0


class DaemonStream:
    """`on_connection` is called with a connection problem, and with None when the connection works again."""

    def __init__(self, on_connection: Callable[[str | None], None]) -> None:
        self._on_connection = on_connection
        # One thread: after a crash, only one of the streams starts the next daemon.
        self._dialler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dial")

    async def ask(self, method: str, path: str, query: Mapping[str, str] | None = None, body: object = None) -> Answer:
        try:
            async with asyncio.timeout(_ANSWER_S), self._open(method, path, query, body) as (reader, length):
                content = await reader.readexactly(length or 0)
        except TimeoutError as error:
            raise silent(running_pid(paths.lock_path())) from error
        except (OSError, EOFError) as error:
            raise EnvironmentFault("the daemon ended before it answered", hint="check whether it was done") from error
        answer: Answer = json.loads(content)
        return answer

    async def watch(self, target: str) -> AsyncGenerator[Answer, None]:
        """Yield the answer of a GET route, and again whenever it has changed, without end."""
        async with aclosing(self.follow("/events", {"watch": target})) as events:
            async for event in events:
                if event is not None:
                    yield event["answer"]

    async def follow(self, path: str, query: Mapping[str, str] | None = None) -> AsyncGenerator[Answer | None, None]:
        """Yield each event of a stream, and None whenever it is opened again. Ends only with a UserError."""
        while True:
            try:
                async with self._open("GET", path, query, None) as (reader, _):
                    self._on_connection(None)
                    yield None
                    while True:
                        event = await asyncio.wait_for(reader.readuntil(b"\n\n"), 40.0)  # heartbeats come every 15 s
                        data = b"".join(line[5:] for line in event.splitlines() if line.startswith(b"data:"))
                        if data:
                            yield json.loads(data)
            except EnvironmentFault as error:
                self._on_connection(str(error))
            except TimeoutError:
                self._on_connection(str(silent(running_pid(paths.lock_path()))))
            except (OSError, EOFError):
                self._on_connection("the daemon has ended")
            await asyncio.sleep(0.5)

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, query: Mapping[str, str] | None, body: object
    ) -> AsyncIterator[tuple[asyncio.StreamReader, int | None]]:
        """Send a request and read the head of the answer. Yield a reader and the length of the content, None if
        unknown."""
        connection = await self._dial()
        reader, writer = await asyncio.open_unix_connection(sock=connection, limit=64 << 20)  # of an event
        try:
            writer.write(render_request(method, path, query, body, {}))
            status, length, fields = read_head(await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _ANSWER_S))
            if status >= 400:
                content = await asyncio.wait_for(reader.readexactly(length or 0), _ANSWER_S)
                read_answer(status, content, fields.get(VERSION_FIELD.lower()))
            yield reader, length
        finally:
            writer.close()

    async def _dial(self) -> socket.socket:
        """Connect in a thread. If this task is cancelled meanwhile, close the connection as soon as it is made."""
        dialling = self._dialler.submit(_dial)
        try:
            return await asyncio.wrap_future(dialling)
        except asyncio.CancelledError:

            def close(dialled: "Future[socket.socket]") -> None:
                if not dialled.cancelled() and dialled.exception() is None:
                    dialled.result().close()

            dialling.add_done_callback(close)
            raise


def _dial() -> socket.socket:
    """Return a non-blocking socket that is connected to the daemon; start the daemon if it has crashed."""
    connection = dial(paths.socket_path())
    if connection is None and has_crashed():
        connect(start=True).close()
        connection = dial(paths.socket_path())
    if connection is None:
        raise NoDaemon("no daemon runs", hint="`gpuyard daemon start` starts one")
    made = socket.socket(fileno=connection.detach())
    made.settimeout(0.0)
    return made


# Runs work in the background, and cancels earlier work of the same name.
Work = Callable[[], Coroutine[None, None, object]]
Run = Callable[[Work, str], object]
# Delay before the log of a newly selected job is requested, and between two redraws of a fast log.
_PAUSE_S = 0.1
# Rows that can be marked at once.
MOST_MARKED = 500


class Subscriptions:
    """`draw` redraws the named panels, or all of them; `show_notice` shows a notice."""

    def __init__(
        self, state: ScreenState, draw: Callable[..., None], show_notice: Callable[[ActionNotice], None], run: Run
    ) -> None:
        self._state, self._draw, self._show_notice, self._run = state, draw, show_notice, run
        self.stream = DaemonStream(self._hear_connection)
        self._rows, self._filter = "", state.filter_query()
        self._log: tuple[int, bool] | None = None
        self._is_log_due = False
        self._over_after: int | None = None
        self._heard_at = 0.0

    def start(self) -> None:
        self._run(self._watch_machine, "machine")
        self._run(self._watch_silence, "silence")

    def follow_visible(self) -> None:
        """Update the streams. Call it whenever other rows are visible or another one is selected."""
        target, after = self._state.jobs_wanted()
        query = self._state.filter_query()
        if query != self._filter:
            self._filter = query
            self._run(self._unmark_filtered, "marks")
        if target != self._rows:
            self._rows = target
            self._run(partial(self._watch_rows, target, after), "rows")
        row = self._state.chosen
        log = None if row is None or row.get("group") else (int(row["id"]), row["attempt"] > 0)
        goes_on = row is not None and self._over_after is not None and row["attempt"] > self._over_after
        if log != self._log or goes_on:
            self._log, self._over_after = log, None
            self._run(partial(self._watch_log, log), "log")

    async def _unmark_filtered(self) -> None:
        """Unmark what the filter does not list. Only the daemon knows that of rows that are not loaded."""
        marked = dict(self._state.marked)
        jobs = [key for key in marked if isinstance(key, int)]
        query = {**self._filter, "ids": format_ids(jobs), "limit": str(len(jobs))}
        try:
            found = (await self.stream.ask("GET", "/jobs", query))["jobs"] if jobs else []
        except GpuyardError as error:
            self._show_notice(failed(error))
            return
        self._state.unmark_filtered(marked, found)
        self._draw("queue")

    def _hear_connection(self, trouble: str | None) -> None:
        trouble = trouble and f"reconnecting: {trouble}"
        if trouble != self._state.trouble:
            self._state.trouble = trouble
            self._draw("head", "queue")

    async def _watch_machine(self) -> None:
        async with aclosing(self.stream.follow("/events", {"watch": "/status /devices"})) as events:
            async for event in events:
                self._heard_at = asyncio.get_running_loop().time()
                if event is None:
                    self._run(self._ask_history, "history")
                elif event["watch"] == "/status":
                    self._state.status = event["answer"]
                    self._draw("head", "queue", "notice")
                else:
                    before = self._state.heights()
                    self._state.hear_devices(event["answer"])
                    if self._state.heights() == before:
                        self._draw("head", "devices")
                    else:
                        self._state.resize(self._state.width, self._state.height)
                        self._draw()
                        self.follow_visible()

    async def _watch_silence(self) -> None:
        loop = asyncio.get_running_loop()
        self._heard_at = loop.time()
        while True:
            await asyncio.sleep(1.0)
            late_s = loop.time() - self._heard_at
            # While a client watches, the daemon samples each second: a longer silence means that it is blocked.
            silent_s = int(late_s) if late_s > 4 else 0
            if silent_s != self._state.silent_s:
                self._state.silent_s = silent_s
                self._draw("head")

    async def _ask_history(self) -> None:
        try:
            self._state.hear_history(await self.stream.ask("GET", "/devices/history", {"span": "10m"}))
        except GpuyardError as error:
            self._show_notice(failed(error))
        self._draw("devices")

    async def _watch_rows(self, target: str, after: int) -> None:
        async with aclosing(self.stream.watch(target)) as answers:
            async for answer in answers:
                if "error" in answer:
                    self._show_notice(failed(UserError(answer["error"], hint=answer.get("hint"))))
                    continue
                self._state.hear_jobs(answer, after)
                self._draw("queue", "log")
                self.follow_visible()

    async def _watch_log(self, log: tuple[int, bool] | None) -> None:
        if log is None or not log[1]:
            row = self._state.chosen
            opens = "Enter shows its runs" if row is not None and row.get("group") else ""
            self._begin_log(opens if log is None else "not started yet; w says why")
            return
        self._begin_log("")
        await asyncio.sleep(_PAUSE_S)
        try:
            query = {"tail": "65536", "stream": "both"}
            async with aclosing(self.stream.follow(f"/jobs/{log[0]}/log/live", query)) as events:
                await self._hear_log(events)
        except UserError as error:
            self._state.log_note = str(error)
            self._draw("log")

    async def _hear_log(self, events: AsyncIterator[Answer | None]) -> None:
        async for event in events:
            if event is None:
                self._begin_log("no output yet")
            elif "text" in event:
                self._state.log.feed(event["text"], is_stderr=event.get("is_stderr", False))
                self._draw_log_soon()
            elif "attempt" in event and len(self._state.log):
                self._state.log.separate(f"--- attempt {event['attempt']} ---")
            elif "cut" in event:
                self._state.log.separate("--- output left out: it is written faster than it can be shown ---")
            elif "error" in event or "over" in event:
                row = self._state.chosen
                self._over_after = None if row is None else row["attempt"]
                self._state.log_note = event.get("error") or "no output"
                self._draw("log")
                return

    def _begin_log(self, note: str) -> None:
        self._state.log, self._state.log_note = LogText(), note
        self._draw("log")

    def _draw_log_soon(self) -> None:
        """Draw the log after 0.1 s, together with what arrives until then."""

        def draw() -> None:
            self._is_log_due = False
            self._draw("log")

        if not self._is_log_due:
            self._is_log_due = True
            asyncio.get_running_loop().call_later(_PAUSE_S, draw)
