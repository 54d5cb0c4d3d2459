"""The mutex of a ledger for a program that must not wait for it: a thread waits, and then the program has its turn."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gpuyard.errors import EnvironmentFault, LedgerBusy
from gpuyard.leases.ledger_mutex import busy_too_long, release_mutex, try_mutex
from gpuyard.system.file_locks import pauses_s
from gpuyard.system.interrupts import DeferInterrupts

_TOO_LONG_S = 0.2


class MutexTurns:
    """All but the waiting happens in one thread, that of the program.

    `on_turn` is called in the waiting thread when the mutex is held for the program, until `end_turn`; and once when
    others have held it for too long. The waiting thread asks `can_use_turn` first, and leaves the mutex to others while
    that is false.
    """

    def __init__(self, folder: Path) -> None:
        self.on_turn: Callable[[], object] = lambda: None  # the program tries again by itself
        self.can_use_turn: Callable[[], bool] = lambda: True
        self._folder = folder
        self._changing = threading.Lock()
        self._waits_since: float | None = None
        self._held: int | None = None
        self._is_closed = False

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the mutex for the block. If another process has it: raises LedgerBusy, and WaitedTooLong after a while;
        `on_turn` is called later."""
        with DeferInterrupts():
            if self._held is not None:
                yield
                return
            descriptor = try_mutex(self._folder)
            if descriptor is not None:
                try:
                    yield
                finally:
                    release_mutex(descriptor)
                return
        since = self._wait()
        if time.monotonic() - since > _TOO_LONG_S:
            raise busy_too_long(self._folder, _TOO_LONG_S)
        raise LedgerBusy(f"the ledger in {self._folder} is busy")

    def end_turn(self) -> None:
        with self._changing:
            if self._held is not None:
                release_mutex(self._held)
                self._held = None

    def close(self) -> None:
        """Wait no more. `on_turn` is not called again."""
        with self._changing:
            self._is_closed = True
        self.end_turn()

    def _wait(self) -> float:
        """Let a thread wait, and return since when it does."""
        with self._changing:
            if self._held is not None:  # since a moment ago
                return time.monotonic()
            if self._waits_since is None:
                self._waits_since = time.monotonic()
                threading.Thread(target=self._wait_for_turn, name="ledger mutex", daemon=True).start()
            return self._waits_since

    def _wait_for_turn(self) -> None:
        late_at = time.monotonic() + _TOO_LONG_S
        for pause_s in pauses_s():
            time.sleep(pause_s)
            is_late = time.monotonic() > late_at
            if self._take_turn(is_late=is_late):
                return
            if is_late:
                late_at = math.inf

    def _take_turn(self, *, is_late: bool) -> bool:
        """Return whether the wait is over."""
        with self._changing:
            if self._is_closed:
                return True
            try:
                self._held = try_mutex(self._folder) if self.can_use_turn() else None
                is_over = self._held is not None
            except EnvironmentFault:  # the program finds the same
                is_over = True
            if is_over:
                self._waits_since = None
            if is_over or is_late:
                self.on_turn()
            return is_over
