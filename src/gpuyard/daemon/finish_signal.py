"""Wakes the requests that wait for jobs to finish."""

import asyncio
from collections.abc import Callable

# Jobs may finish a thousand times a second; waits are checked no more often than this.
_WAKE_EVERY_S = 0.01


class FinishSignal:
    """Wakes waits when jobs finish, at most once every 10 ms."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._woken_at = 0.0

    def announce(self) -> None:
        """Announce that jobs have finished."""
        if self._waiters and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._woken_at + _WAKE_EVERY_S), self._wake)

    async def wait(self, is_over: Callable[[], bool], timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not is_over() and (left := deadline - loop.time()) > 0:
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.add(waiter)
            try:
                await asyncio.wait([waiter], timeout=left)
            finally:
                self._waiters.discard(waiter)

    def _wake(self) -> None:
        self._timer, self._woken_at = None, asyncio.get_running_loop().time()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
