"""The thread in which messages wait for their turn and are sent, so that nothing of it holds up the queue.

What it is given lies in an inbox of bounded size; what is over is dropped, and counted for each target, which is told
the count. Each target has one message under way at most, so one that hangs holds up no other.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from gpuyard.core.notify.messages import Message, Occurrence
from gpuyard.core.notify.rate_limit import Outbox
from gpuyard.core.notify.subscriptions import is_url, redacted_target
from gpuyard.daemon.notify.send_message import LIMIT_S, LOOK_EVERY_S, Result, Sending, apprise_missing, has_apprise

_log = logging.getLogger(__name__)
_MOST_WAITING = 10_000
_MOST_UNDER_WAY = 8
_AGAIN_AFTER_S = 10.0
_AT_THE_END_S = 1.0
_JOIN_S = 5.0


class DeliveryThread:
    def __init__(
        self,
        host: str,
        per_minute: int,
        on_notice: Callable[[str], None],
        *,
        limit_s: float = LIMIT_S,
        again_after_s: float = _AGAIN_AFTER_S,
    ) -> None:
        self.per_minute = per_minute
        self._host = host
        self._on_notice = on_notice
        self._limit_s = limit_s
        self._again_after_s = again_after_s
        self._news = threading.Condition()
        self._inbox: deque[tuple[str, Occurrence]] = deque()
        self._dropped: Counter[str] = Counter()
        self._is_over = False
        self._thread: threading.Thread | None = None
        self._outboxes: dict[str, Outbox] = {}
        self._under_way: dict[str, Sending] = {}
        self._tried: dict[str, Message] = {}
        self._lacks_apprise = False

    def put(self, addressed: Sequence[tuple[str, Occurrence]]) -> None:
        """Never waits. What comes together is told together, where one target has several of them."""
        with self._news:
            for target, occurrence in addressed:
                if len(self._inbox) < _MOST_WAITING:
                    self._inbox.append((target, occurrence))
                else:
                    self._dropped[target] += 1
            self._news.notify()
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="gpuyard-notifying", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # too many processes; with the next message it is tried again
            _log.warning("notifications wait: %s", error)
        else:
            self._thread = thread

    def close(self) -> None:
        """Whatever is under way has a moment to end."""
        with self._news:
            self._is_over = True
            self._news.notify()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def check_apprise(self, targets: Sequence[str]) -> bool:
        """Whether they can be sent to; where they cannot for want of Apprise, that is told once."""
        if not any(map(is_url, targets)) or has_apprise():
            return True
        if not self._lacks_apprise:
            self._lacks_apprise = True
            notice = apprise_missing()
            _log.warning(notice)
            self._on_notice(notice)
        return False

    # In the thread

    def _run(self) -> None:
        while not self._is_over:
            self._turn()
            self._wait()
        self._turn()
        deadline = time.monotonic() + _AT_THE_END_S
        while self._under_way and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)
            self._see_what_ended()
        self._give_up()

    def _turn(self) -> None:
        self._sort()
        self._see_what_ended()
        self._begin()

    def _wait(self) -> None:
        dues = (
            each.due_at(self.per_minute) for target, each in self._outboxes.items() if target not in self._under_way
        )
        due_at = min((due for due in dues if due is not None), default=None)
        waits = [LOOK_EVERY_S] if self._under_way else []
        waits += [max(0.0, due_at - time.monotonic())] if due_at is not None and not self._is_full() else []
        with self._news:
            if not self._inbox and not self._dropped and not self._is_over:
                self._news.wait(min(waits) if waits else None)

    def _sort(self) -> None:
        with self._news:
            came, self._inbox = self._inbox, deque()
            dropped, self._dropped = self._dropped, Counter()
        for target, occurrence in came:
            self._outboxes.setdefault(target, Outbox()).add(occurrence)
        for target, count in dropped.items():
            self._outboxes.setdefault(target, Outbox()).add_dropped(count)

    def _is_full(self) -> bool:
        return len(self._under_way) >= _MOST_UNDER_WAY

    def _begin(self) -> None:
        now = time.monotonic()
        for target, outbox in list(self._outboxes.items()):
            if outbox.is_over(now) and target not in self._under_way:
                del self._outboxes[target]
            elif target not in self._under_way and not self._is_full():
                message = outbox.take(now, self.per_minute, self._host)
                if message is not None and self.check_apprise([target]):
                    self._under_way[target] = Sending(target, message, self._limit_s)

    def _see_what_ended(self) -> None:
        for target, sending in list(self._under_way.items()):
            result = sending.poll()
            if result is not None:
                del self._under_way[target]
                self._judge(target, sending.message, result)

    def _judge(self, target: str, message: Message, result: Result) -> None:
        was_tried = self._tried.pop(target, None) is message
        if result.problem is None:
            return
        if is_url(target) and not was_tried:
            self._tried[target] = message
            self._outboxes.setdefault(target, Outbox()).try_again(message, time.monotonic() + self._again_after_s)
            return
        _log.warning("a notification by %s was not sent: %s", redacted_target(target), result.problem)

    def _give_up(self) -> None:
        left = sum(map(len, self._outboxes.values())) + len(self._under_way)
        for sending in self._under_way.values():
            sending.end()
        if left:
            _log.warning("not sent before the end of the daemon: %d of the notifications", left)
