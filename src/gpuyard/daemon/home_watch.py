"""Notices that the folder of the queue was removed, renamed, replaced or given to another machine (`gpuyard daemon
adopt`) while the daemon runs.

The daemon is then invisible: commands start a second one at that path. So it starts no further jobs, goes on until its
running jobs have ended and are recorded, and then ends by itself.
"""

import asyncio
import time
from collections.abc import Callable

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
