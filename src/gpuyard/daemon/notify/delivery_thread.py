"""The thread that queues and sends notifications, so that a slow target never delays the scheduler.

The inbox is bounded: notifications above the limit are dropped, and the next message to their target gives the count.
Each target has at most one message in flight, so a target that hangs delays no other.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from gpuyard.core.notify.messages import Message, Occurrence
from gpuyard.core.notify.rate_limit import Outbox
from gpuyard.core.notify.subscriptions import is_url, redacted_target
from gpuyard.daemon.notify.send_message import LIMIT_S, POLL_EVERY_S, Sending, apprise_missing, has_apprise

_log = logging.getLogger(__name__)
_MAX_WAITING = 10_000
_MAX_IN_FLIGHT = 8
_RETRY_AFTER_S = 10.0
_LAST_CHANCE_S = 1.0
_JOIN_S = 5.0


class DeliveryThread:
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
        self._wake = threading.Condition()
        self._inbox: deque[tuple[str, Occurrence]] = deque()
        self._dropped: Counter[str] = Counter()
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._outboxes: dict[str, Outbox] = {}
        self._in_flight: dict[str, Sending] = {}
        self._retried: dict[str, Message] = {}
        self._has_reported_apprise = False

    def put(self, addressed: Sequence[tuple[str, Occurrence]]) -> None:
        """Queue notifications without waiting. Those for one target in one call become one message."""
        with self._wake:
            for target, occurrence in addressed:
                if len(self._inbox) < _MAX_WAITING:
                    self._inbox.append((target, occurrence))
                else:
                    self._dropped[target] += 1
            self._wake.notify()
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._run, name="gpuyard-notify", daemon=True)
        try:
            thread.start()
            self._thread = thread
        except RuntimeError as error:  # too many threads; the next call tries again
            _log.warning("notifications are delayed: %s", error)

    def close(self) -> None:
        """End the thread. Messages in flight have `_LAST_CHANCE_S` to complete."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

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

    # The thread

    def _run(self) -> None:
        while not self._is_closed:
            self._send_due()
            self._wait()
        self._send_due()
        deadline = time.monotonic() + _LAST_CHANCE_S
        while self._in_flight and time.monotonic() < deadline:
            time.sleep(POLL_EVERY_S)
            self._collect_results()
        left = sum(map(len, self._outboxes.values())) + len(self._in_flight)
        for sending in self._in_flight.values():
            sending.end()
        if left:
            _log.warning("%d notifications were not sent before the daemon stopped", left)

    def _send_due(self) -> None:
        with self._wake:
            arrived, self._inbox = self._inbox, deque()
            dropped, self._dropped = self._dropped, Counter()
        for target, occurrence in arrived:
            self._outboxes.setdefault(target, Outbox()).add(occurrence)
        for target, count in dropped.items():
            self._outboxes.setdefault(target, Outbox()).add_dropped(count)
        self._collect_results()
        self._start_sending()

    def _wait(self) -> None:
        dues = (
            each.due_at(self.per_minute) for target, each in self._outboxes.items() if target not in self._in_flight
        )
        due_at = min((due for due in dues if due is not None), default=None)
        waits = [POLL_EVERY_S] if self._in_flight else []
        waits += [max(0.0, due_at - time.monotonic())] if due_at is not None and not self._is_full() else []
        with self._wake:
            if not self._inbox and not self._dropped and not self._is_closed:
                self._wake.wait(min(waits) if waits else None)

    def _is_full(self) -> bool:
        return len(self._in_flight) >= _MAX_IN_FLIGHT

    def _start_sending(self) -> None:
        now = time.monotonic()
        for target, outbox in list(self._outboxes.items()):
            if outbox.is_over(now) and target not in self._in_flight:
                del self._outboxes[target]
            elif target not in self._in_flight and not self._is_full():
                message = outbox.take(now, self.per_minute, self._host)
                if message is not None and self.check_apprise([target]):
                    self._in_flight[target] = Sending(target, message, self._limit_s)

    def _collect_results(self) -> None:
        for target, sending in list(self._in_flight.items()):
            if not sending.is_in_flight():
                del self._in_flight[target]
                if sending.may_begin_later:
                    self._try_again(target, sending.message)
                else:
                    self._handle_result(target, sending.message, sending.problem)

    def _try_again(self, target: str, message: Message) -> None:
        self._outboxes.setdefault(target, Outbox()).try_again(message, time.monotonic() + self._retry_after_s)

    def _handle_result(self, target: str, message: Message, problem: str | None) -> None:
        was_retried = self._retried.pop(target, None) is message
        if problem is None:
            return
        if is_url(target) and not was_retried:
            self._retried[target] = message
            self._try_again(target, message)
            return
        _log.warning("a notification to %s was not sent: %s", redacted_target(target), problem)
