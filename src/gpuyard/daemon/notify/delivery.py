"""Queues and sends notifications, so that a slow target never delays the daemon.

The number of notifications that wait is bounded: those above the limit are dropped, and the next message to their
target gives the count. Each target has at most one message in flight, so a target that hangs delays no other.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from gpuyard.core.notify.messages import Message, Occurrence
from gpuyard.core.notify.rate_limit import Outbox
from gpuyard.core.notify.subscriptions import is_url, redacted_target
from gpuyard.daemon.notify.send_message import LIMIT_S, apprise_missing, has_apprise, send

_log = logging.getLogger(__name__)
_MAX_WAITING = 10_000
_MAX_IN_FLIGHT = 8
_RETRY_AFTER_S = 10.0
_LAST_CHANCE_S = 1.0


class Delivery:
    """`retry_after_s`: after which a service that failed is tried once more."""

    def __init__(
        self,
        host: str,
        per_minute: int,
        on_notice: Callable[[str], None],
        *,
        limit_s: float = LIMIT_S,
        retry_after_s: float = _RETRY_AFTER_S,
    ) -> None:
        self.per_minute = per_minute
        self._host = host
        self._on_notice = on_notice
        self._limit_s = limit_s
        self._retry_after_s = retry_after_s
        self._outboxes: dict[str, Outbox] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(_MAX_IN_FLIGHT, "gpuyard-notify")
        self._in_flight: set[asyncio.Future[str | None]] = set()
        self._is_closed = threading.Event()
        self._has_reported_apprise = False

    def put(self, addressed: Sequence[tuple[str, Occurrence]]) -> None:
        """Queue notifications. Those for one target in one call become one message."""
        now, waiting = time.monotonic(), sum(map(len, self._outboxes.values()))
        for target in [target for target, outbox in self._outboxes.items() if outbox.is_over(now)]:
            if target not in self._tasks:
                del self._outboxes[target]
        for target, occurrence in addressed:
            outbox = self._outboxes.setdefault(target, Outbox())
            if waiting < _MAX_WAITING:
                outbox.add(occurrence)
            else:
                outbox.add_dropped(1)
            waiting += 1
            if target not in self._tasks:
                self._tasks[target] = asyncio.get_running_loop().create_task(self._serve(target, outbox))

    async def close(self) -> None:
        """End. Messages in flight have `_LAST_CHANCE_S` to complete."""
        await asyncio.sleep(0)  # for those that were put just now
        if self._in_flight:
            await asyncio.wait(self._in_flight, timeout=_LAST_CHANCE_S)
        left = sum(map(len, self._outboxes.values())) + sum(not each.done() for each in self._in_flight)
        for task in list(self._tasks.values()):
            task.cancel()
        self._is_closed.set()
        self._threads.shutdown()
        if left:
            _log.warning("%d notifications were not sent before the daemon stopped", left)

    def check_apprise(self, targets: Sequence[str]) -> bool:
        """Return False, and report it once, if a target needs Apprise and Apprise is not installed."""
        if not any(map(is_url, targets)) or has_apprise():
            return True
        if not self._has_reported_apprise:
            self._has_reported_apprise = True
            notice = apprise_missing()
            _log.warning(notice)
            self._on_notice(notice)
        return False

    async def _serve(self, target: str, outbox: Outbox) -> None:
        try:
            while (due_at := outbox.due_at(self.per_minute)) is not None:
                await asyncio.sleep(max(0.0, due_at - time.monotonic()))
                message = outbox.take(time.monotonic(), self.per_minute, self._host)
                if message is not None and self.check_apprise([target]):
                    await self._send(target, message)
        finally:
            del self._tasks[target]

    async def _send(self, target: str, message: Message) -> None:
        problem = await self._try(target, message)
        if problem is not None and is_url(target):
            await asyncio.sleep(self._retry_after_s)
            problem = await self._try(target, message)
        if problem is not None:
            _log.warning("a notification to %s was not sent: %s", redacted_target(target), problem)

    async def _try(self, target: str, message: Message) -> str | None:
        """Send in a thread. Try again later if a limit of the system kept the process or the thread from starting."""
        while True:
            try:
                sending = asyncio.get_running_loop().run_in_executor(
                    self._threads, send, target, message, self._limit_s, self._is_closed
                )
                self._in_flight.add(sending)
                sending.add_done_callback(self._in_flight.discard)
                return await sending
            except (OSError, RuntimeError):
                await asyncio.sleep(self._retry_after_s)
