"""An event loop over poll: calls handlers for readable descriptors and for timers, and sleeps in between."""

import heapq
import itertools
import select
import time
from collections.abc import Callable


class Loop:
    def __init__(self) -> None:
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[int], object]] = {}
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def watch(self, descriptor: int, handler: Callable[[int], object]) -> None:
        """Call `handler` with poll's event mask whenever the descriptor is readable."""
        self._poll.register(descriptor, select.POLLIN)
        self._handlers[descriptor] = handler

    def want_to_write(self, descriptor: int, *, wants: bool) -> None:
        self._poll.modify(descriptor, select.POLLIN | (select.POLLOUT if wants else 0))

    def forget(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        del self._handlers[descriptor]

    def after(self, delay_s: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._numbers), action))

    def turn(self) -> None:
        """Wait for the next event or timer, and handle all that are due."""
        timeout_ms = None
        if self._timers:  # poll cuts off fractions of a millisecond
            timeout_ms = max(0.0, (self._timers[0][0] - time.monotonic()) * 1000 + 1)
        for descriptor, event in self._poll.poll(timeout_ms):
            handler = self._handlers.get(descriptor)  # an earlier handler may have removed it
            if handler is not None:
                handler(event)
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
