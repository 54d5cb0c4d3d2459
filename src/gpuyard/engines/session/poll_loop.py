"""What a runner waits for: descriptors that have something, and times that have come. It sleeps in between."""

import heapq
import itertools
import select
import time
from collections.abc import Callable


class Loop:
    def __init__(self) -> None:
        self._poll = select.poll()
        self._ways: dict[int, Callable[[int], object]] = {}
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def watch(self, descriptor: int, way: Callable[[int], object]) -> None:
        """`way` is called with what poll says of it, while there is something to read."""
        self._poll.register(descriptor, select.POLLIN)
        self._ways[descriptor] = way

    def want_to_write(self, descriptor: int, *, wants: bool) -> None:
        self._poll.modify(descriptor, select.POLLIN | (select.POLLOUT if wants else 0))

    def forget(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        del self._ways[descriptor]

    def after(self, delay_s: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._due, (time.monotonic() + delay_s, next(self._numbers), action))

    def turn(self) -> None:
        for descriptor, event in self._poll.poll(self._patience_ms()):
            way = self._ways.get(descriptor)  # one before may have forgotten it
            if way is not None:
                way(event)
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            heapq.heappop(self._due)[2]()

    def _patience_ms(self) -> float | None:
        if not self._due:
            return None
        return max(0.0, (self._due[0][0] - time.monotonic()) * 1000 + 1)  # poll drops what is less than a millisecond
