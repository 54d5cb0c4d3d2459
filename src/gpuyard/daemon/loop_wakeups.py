"""What wakes the scheduler's loop, or the requests that wait, beside its own steps: jobs that finished, the loss of the
queue's folder, and the end of another process's lease.

A daemon whose folder was removed, renamed, replaced or given to another machine is invisible: commands start a
second one at the path. So it starts no further jobs. It goes on until its running jobs have ended, because it still
records their ends and holds their leases; then it ends by itself.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from gpuyard.ledger.file_watch import FileWatch

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


_CHECK_EVERY_S = 1.0
_CHECK_IDLE_EVERY_S = 5.0


class HomeWatch:
    def __init__(self, has_home: Callable[[], bool], folder: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._has_home, self.folder, self._clock = has_home, folder, clock
        self._checked_at: float | None = None
        self.problem: str | None = None
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, on_loss: Callable[[], None]) -> None:
        """Look every 5 s although nothing happens, and call `on_loss` when the home is lost."""
        self._timer = asyncio.get_running_loop().call_later(_CHECK_IDLE_EVERY_S, self.watch, on_loss)
        if self.has_lost_home():
            on_loss()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def has_lost_home(self) -> bool:
        """Look at most once a second. A home that is lost stays lost: a second daemon may use the path by then."""
        now = self._clock()
        if self.problem is None and (self._checked_at is None or now >= self._checked_at + _CHECK_EVERY_S):
            self._checked_at = now
            if not self._has_home():
                self.problem = (
                    f"the folder of this queue, {self.folder}, was removed, renamed or replaced, or another machine "
                    "adopted it: this daemon starts no more jobs, and ends when the running ones have ended; its "
                    "waiting jobs are in the folder as it was"
                )
        return self.problem is not None


class LedgerWatch:
    def __init__(self, folder: Path, on_change: Callable[[], None]) -> None:
        self._folder = folder
        self._tell = on_change
        self._watch: FileWatch | None = None

    def set(self, *, is_wanted: bool) -> None:
        if is_wanted == (self._watch is not None):
            return
        loop = asyncio.get_running_loop()
        if self._watch is not None:
            loop.remove_reader(self._watch.fileno())
            self._watch.give_back()
            self._watch = None
            return
        watch = FileWatch(self._folder)
        if watch.fileno() < 0:
            watch.give_back()
            return
        self._watch = watch
        loop.add_reader(watch.fileno(), self._on_change)

    def _on_change(self) -> None:
        if self._watch is not None:
            self._watch.clear()
        self._tell()
