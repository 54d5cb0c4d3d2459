"""Streams from the daemon into the screen state: the machine, the visible rows, the log of the selected job.

Each is a stream of its own; only what is visible is requested.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from functools import partial

from gpuyard.core.job.selection import format_ids
from gpuyard.errors import GpuyardError, UserError
from gpuyard.ui.tui.daemon_stream import Answer, DaemonStream
from gpuyard.ui.tui.job_actions import ActionNotice, failed
from gpuyard.ui.tui.log_text import LogText
from gpuyard.ui.tui.screen_state import ScreenState

# Runs work in the background, and cancels earlier work of the same name.
Work = Callable[[], Coroutine[None, None, object]]
Run = Callable[[Work, str], object]
_LOG_BYTES = "65536"
# Delay before the log of a newly selected job is requested, and between two redraws of a fast log.
_PAUSE_S = 0.1
# While a client watches, the daemon samples each second: a longer silence means that it is blocked.
_LATE_S = 4.0
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
                    self._hear_devices(event["answer"])

    async def _watch_silence(self) -> None:
        loop = asyncio.get_running_loop()
        self._heard_at = loop.time()
        while True:
            await asyncio.sleep(1.0)
            late_s = loop.time() - self._heard_at
            silent_s = int(late_s) if late_s > _LATE_S else 0
            if silent_s != self._state.silent_s:
                self._state.silent_s = silent_s
                self._draw("head")

    def _hear_devices(self, answer: Answer) -> None:
        before = self._state.heights()
        self._state.hear_devices(answer)
        if self._state.heights() == before:
            self._draw("head", "devices")
            return
        self._state.resize(self._state.width, self._state.height)
        self._draw()
        self.follow_visible()

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
            query = {"tail": _LOG_BYTES, "stream": "both"}
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
        if not self._is_log_due:
            self._is_log_due = True
            asyncio.get_running_loop().call_later(_PAUSE_S, self._draw_log)

    def _draw_log(self) -> None:
        self._is_log_due = False
        self._draw("log")
