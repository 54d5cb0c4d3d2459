"""Holds the ends of attempts back while threads do what has to come before: logs are read, containers removed, results
brought back. A disk or a tool may hang: each is waited for up to a limit."""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class HeldWork(Generic[T]):
    def __init__(self) -> None:
        self.since = time.monotonic()
        self.has_begun = self.is_done = False
        self.result: T | None = None


class Holds(Generic[T]):
    """For one thread. `wake` is called, from any thread, when work is done."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.begun: dict[str, HeldWork[T]] = {}

    def holds(self, name: str, work: Callable[[], T], most_s: float) -> bool:
        """Begin the work, unless it has begun. Return whether to wait for it; then call this again later."""
        held = self.begun.setdefault(name, HeldWork())
        if not held.has_begun:
            with contextlib.suppress(RuntimeError):  # no more threads: tried again
                threading.Thread(target=self._run, args=(held, work), name="gpuyard-end", daemon=True).start()
                held.has_begun = True
        return not held.is_done and time.monotonic() < held.since + most_s

    def take(self, name: str) -> T | None:
        """Forget the work; return its result, or None if it is not done."""
        held = self.begun.pop(name, None)
        return None if held is None else held.result

    def _run(self, held: HeldWork[T], work: Callable[[], T]) -> None:
        try:
            held.result = work()
        finally:
            held.is_done = True
            self._wake()
