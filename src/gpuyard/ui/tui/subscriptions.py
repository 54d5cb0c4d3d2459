"""What the daemon tells, put onto the board as it comes: the machine, the rows that are seen, the chosen job's log.

Each is a stream of its own, and only what is seen is asked for.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from functools import partial

from gpuyard.errors import GpuyardError, UserError
from gpuyard.ui.tui.daemon_stream import Answer, DaemonStream
from gpuyard.ui.tui.job_actions import ActionNotice, failed
from gpuyard.ui.tui.log_text import LogText
from gpuyard.ui.tui.screen_state import ScreenState

# Runs it in the background, in place of what ran under that name.
Work = Callable[[], Coroutine[None, None, None]]
Run = Callable[[Work, str], object]
_LOG_BYTES = "65536"
# So long a job is chosen before its log is asked for, and so long between two drawings of one that is written fast.
_PAUSE_S = 0.1
# While anybody watches, the machine is looked at each second: no news for longer means a daemon that is held up.
_LATE_S = 4.0


class Subscriptions:
    """`draw` draws these panels again, or all where they have moved; `tell` says what has happened."""

    def __init__(
        self, board: ScreenState, draw: Callable[..., None], tell: Callable[[ActionNotice], None], run: Run
    ) -> None:
        self._board, self._draw, self._tell, self._run = board, draw, tell, run
        self.link = DaemonStream(self._hear_standing)
        self._rows = ""
        self._log: tuple[int, bool] | None = None
        self._is_log_due = False
        self._over_after: int | None = None
        self._heard_at = 0.0

    def start(self) -> None:
        self._run(self._watch_machine, "machine")
        self._run(self._watch_silence, "silence")

    def follow_what_is_seen(self) -> None:
        """To be called whenever other rows are seen, or another one is chosen."""
        target, after = self._board.jobs_wanted()
        if target != self._rows:
            self._rows = target
            self._run(partial(self._watch_rows, target, after), "rows")
        row = self._board.chosen
        log = None if row is None else (int(row["id"]), row["attempt"] > 0)
        goes_on = row is not None and self._over_after is not None and row["attempt"] > self._over_after
        if log != self._log or goes_on:
            self._log, self._over_after = log, None
            self._run(partial(self._watch_log, log), "log")

    def _hear_standing(self, trouble: str | None) -> None:
        trouble = trouble and f"reconnecting: {trouble}"
        if trouble != self._board.trouble:
            self._board.trouble = trouble
            self._draw("head", "queue")

    async def _watch_machine(self) -> None:
        async with aclosing(self.link.follow("/events", {"watch": "/status /devices"})) as heard:
            async for event in heard:
                self._heard_at = asyncio.get_running_loop().time()
                if event is None:
                    self._run(self._ask_history, "history")
                elif event["watch"] == "/status":
                    self._board.status = event["answer"]
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
            if silent_s != self._board.silent_s:
                self._board.silent_s = silent_s
                self._draw("head")

    def _hear_devices(self, answer: Answer) -> None:
        before = self._board.heights()
        self._board.hear_devices(answer)
        if self._board.heights() == before:
            self._draw("head", "devices")
            return
        self._board.resize(self._board.width, self._board.height)
        self._draw()
        self.follow_what_is_seen()

    async def _ask_history(self) -> None:
        try:
            self._board.hear_history(await self.link.ask("GET", "/devices/history", {"span": "10m"}))
        except GpuyardError as error:
            self._tell(failed(error))
        self._draw("devices")

    async def _watch_rows(self, target: str, after: int) -> None:
        async with aclosing(self.link.watch(target)) as heard:
            async for _, answer in heard:
                if "error" in answer:
                    self._tell(failed(UserError(answer["error"], hint=answer.get("hint"))))
                    continue
                self._board.hear_jobs(answer, after)
                self._draw("queue", "log")
                self.follow_what_is_seen()

    async def _watch_log(self, log: tuple[int, bool] | None) -> None:
        if log is None or not log[1]:
            self._begin_log("" if log is None else "it has not begun yet; w says why")
            return
        self._begin_log("")
        await asyncio.sleep(_PAUSE_S)
        try:
            async with aclosing(self.link.follow(f"/jobs/{log[0]}/log/live", {"tail": _LOG_BYTES})) as heard:
                await self._hear_log(heard)
        except UserError as error:
            self._board.log_note = str(error)
            self._draw("log")

    async def _hear_log(self, heard: AsyncIterator[Answer | None]) -> None:
        async for event in heard:
            if event is None:
                self._begin_log("it has written nothing yet")
            elif "text" in event:
                self._board.log.feed(event["text"])
                self._draw_log_soon()
            elif "attempt" in event and len(self._board.log):
                self._board.log.feed(f"\n--- attempt {event['attempt']} ---\n")
            elif "cut" in event:
                self._board.log.feed("\n--- some of it is left out: it is written faster than it is read ---\n")
            elif "error" in event or "over" in event:
                self._end_log(event.get("error") or "it has written nothing")
                return

    def _end_log(self, note: str) -> None:
        row = self._board.chosen
        self._over_after = None if row is None else row["attempt"]
        self._board.log_note = note
        self._draw("log")

    def _begin_log(self, note: str) -> None:
        self._board.log, self._board.log_note = LogText(), note
        self._draw("log")

    def _draw_log_soon(self) -> None:
        """With whatever else comes meanwhile."""
        if not self._is_log_due:
            self._is_log_due = True
            asyncio.get_running_loop().call_later(_PAUSE_S, self._draw_log)

    def _draw_log(self) -> None:
        self._is_log_due = False
        self._draw("log")
