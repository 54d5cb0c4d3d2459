"""Crash injection: a daemon can die between any two calls of a port. Each call has a crash point before and after it.

A crashed daemon does nothing more: clean-up code that an exception would run reaches no port.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from gpuyard.errors import StoreFault

CrashPoint = tuple[str, str]


class Crash(BaseException):
    """The daemon was killed here."""


class CrashPoints:
    """Counts the crash points of a scenario over all its daemons, and kills the daemon at the chosen ones."""

    def __init__(self, crash_at: frozenset[int] = frozenset()) -> None:
        self.passed: list[CrashPoint] = []
        self.crashed: list[CrashPoint] = []
        self._crash_at = crash_at

    def is_deadly(self, point: CrashPoint) -> bool:
        self.passed.append(point)
        if len(self.passed) - 1 not in self._crash_at:
            return False
        self.crashed.append(point)
        return True


class Thread:
    """One daemon as its ports see it: after a crash (`is_cut`) no call reaches them."""

    def __init__(self, crash_points: CrashPoints) -> None:
        self._crash_points = crash_points
        self.is_cut = False

    def reach(self, name: str, side: str) -> None:
        if self.is_cut or self._crash_points.is_deadly((name, side)):
            self.is_cut = True
            raise Crash


class Port:
    """A proxy for a port, with a crash point before and after each call."""

    def __init__(self, name: str, target: Any, thread: Thread) -> None:
        self._name = name
        self._target = target
        self._thread = thread

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(self._target, attribute)
        if not callable(found):
            return found
        call = self._wrapped(f"{self._name}.{attribute}", found)
        self.__dict__[attribute] = call
        return call

    def _wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self._thread.reach(name, "before")
            result = function(*arguments, **named)
            self._thread.reach(name, "after")
            return result

        return call


class LeasesPort(Port):
    def grant(self, decide: Any) -> list[Any]:
        self._thread.reach("leases.grant", "before")
        granted = [Port("claim", held, self._thread) for held in self._target.grant(decide)]
        self._thread.reach("leases.grant", "after")
        return granted


class StorePort(Port):
    """A proxy for the store. Transactions can also fail because the disk is full; the next one then succeeds."""

    def __init__(self, target: Any, thread: Thread, is_full: Callable[[], bool]) -> None:
        super().__init__("store", target, thread)
        self._is_full = is_full
        self._has_failed = False

    @contextlib.contextmanager
    def transaction(self, *, is_synced: bool = False) -> Iterator[None]:
        self._thread.reach("store.transaction", "before")
        with self._target.transaction(is_synced=is_synced):
            self._thread.reach("store.transaction", "after")
            yield
            self._thread.reach("store.commit", "before")
            self._has_failed = not self._has_failed and self._is_full()
            if self._has_failed:
                raise StoreFault("the disk is full")
        self._thread.reach("store.commit", "after")
