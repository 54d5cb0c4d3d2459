"""What wakes the scheduler's loop, or the requests that wait, beside its own steps: the timer of the next step, jobs
that finished, the loss of the queue's folder, and the end of another process's lease.

A daemon whose folder was removed, renamed, replaced or given to another machine is invisible: commands start a
second one at the path. So it starts no further jobs. It goes on until its running jobs have ended, because it still
records their ends and holds their leases; then it ends by itself.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gpuyard.engines.local.engine import LocalEngine
from gpuyard.ports import Clock
from gpuyard.queue.step import Controller, Step

if TYPE_CHECKING:
    from gpuyard.ledger.file_watch import FileWatch

# After a job has ended: when to sample again. A driver takes a while to free the memory.
_SETTLE_S = (0.002, 0.01, 0.05, 0.25)


class StepTimer:
    """Calls `on_due` when the next step is due, if nothing happens before."""

    def __init__(self, controller: Controller, engine: LocalEngine, clock: Clock, on_due: Callable[[], None]) -> None:
        self._transitions, self._batch_gates = controller.transitions, controller.batch_gates
        self._engine, self._clock, self._on_due = engine, clock, on_due
        self._settled = len(_SETTLE_S)
        self._handle: asyncio.TimerHandle | None = None

    def settle(self) -> None:
        """Note that memory is being freed: jobs that wait for devices need several samples soon."""
        self._settled = 0

    def set(self, step: Step) -> None:
        """Wait for what this step leaves to be done, at most a minute: the loop's clock stops while the machine is
        suspended, and the queue's does not. Keep a timer that fires up to 0.5 s early: setting one in each of 1000
        steps a second is slow."""
        loop, seconds = asyncio.get_running_loop(), self._seconds(step)
        due = None if seconds is None else loop.time() + min(seconds, 60.0)
        if self._handle is not None and due is not None and due - 0.5 <= self._handle.when() <= due:
            return
        self.cancel()
        self._handle = None if due is None else loop.call_at(due, self._fire, self._on_due)

    def retry_after(self, seconds: float, retry: Callable[[], None]) -> None:
        """Call `retry` in place of `on_due`, once."""
        self.cancel()
        self._handle = asyncio.get_running_loop().call_later(seconds, self._fire, retry)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self, on_due: Callable[[], None]) -> None:
        self._handle = None
        on_due()

    def _seconds(self, step: Step) -> float | None:
        """Return how long to wait after this step; None: until something happens."""
        now, live = self._clock.now(), self._transitions.live
        waits = [] if step.wake_at is None else [max(0.0, step.wake_at - now)]
        if self._batch_gates.is_waiting:
            waits.append(1.0)  # its averages need samples even while no further run may start
        if step.waits_for_devices and step.waits_for_sample and self._settled < len(_SETTLE_S):
            waits.append(_SETTLE_S[self._settled])
            self._settled += 1
        elif step.waits_for_devices:
            waits.append(1.0)
        if live and self._engine.fileno() < 0:  # nothing reports the end of attempts
            waits.append(0.1)
        elif any(each.attempt.devices for each in live.values()):  # measured more often while one is new
            waits.append(0.25 if now - self._transitions.last_start_at < 2.0 else 1.0)
        elif live:
            waits.append(5.0)
        if (check_s := self._engine.containers.next_check_s()) is not None:
            waits.append(check_s)
        return min(waits, default=None)


class FinishSignal:
    """Wakes waits when jobs finish, which may be a thousand times a second: at most once every 10 ms."""

    def __init__(self) -> None:
        self._news: asyncio.Future[None] | None = None  # what all waits wait for
        self._timer: asyncio.TimerHandle | None = None
        self._woken_at = 0.0

    def announce(self) -> None:
        """Announce that jobs have finished."""
        if self._news is not None and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._woken_at + 0.01), self._wake)

    async def wait(self, is_over: Callable[[], bool], timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not is_over() and (left := deadline - loop.time()) > 0:
            self._news = self._news or loop.create_future()
            await asyncio.wait([self._news], timeout=left)

    def _wake(self) -> None:
        self._timer, self._woken_at = None, asyncio.get_running_loop().time()
        if self._news is not None:
            self._news.set_result(None)
            self._news = None


class HomeWatch:
    def __init__(self, has_home: Callable[[], bool], folder: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._has_home, self.folder, self._clock = has_home, folder, clock
        self._checked_at = float("-inf")
        self.problem: str | None = None
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, on_loss: Callable[[], None]) -> None:
        """Look every 5 s although nothing happens, and call `on_loss` when the home is lost."""
        self._timer = asyncio.get_running_loop().call_later(5.0, self.watch, on_loss)
        if self.has_lost_home():
            on_loss()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def has_lost_home(self) -> bool:
        """Look at most once a second. A home that is lost stays lost: a second daemon may use the path by then."""
        now = self._clock()
        if self.problem is None and now >= self._checked_at + 1.0:
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
        self._folder, self._tell = folder, on_change
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
        from gpuyard.ledger.file_watch import FileWatch  # with the first job that waits for others

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
