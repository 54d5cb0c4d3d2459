"""Crash injection: a daemon can die between any two calls of a port. Each call has a gap before and after it.

A crashed daemon does nothing more: clean-up code that an exception would run reaches no port.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from gpuyard.errors import StoreFault

Gap = tuple[str, str]


class Crash(BaseException):
    """The daemon was killed here."""


class Gaps:
    """Counts the gaps of a story over all lives of the daemon, and kills the daemon in the chosen ones."""

    def __init__(self, crash_at: frozenset[int] = frozenset()) -> None:
        self.passed: list[Gap] = []
        self.crashed: list[Gap] = []
        self._crash_at = crash_at

    def is_deadly(self, gap: Gap) -> bool:
        self.passed.append(gap)
        if len(self.passed) - 1 not in self._crash_at:
            return False
        self.crashed.append(gap)
        return True


class Thread:
    """The life of one daemon; it is cut at the crash."""

    def __init__(self, gaps: Gaps) -> None:
        self._gaps = gaps
        self.is_cut = False

    def pass_gap(self, name: str, side: str) -> None:
        if self.is_cut or self._gaps.is_deadly((name, side)):
            self.is_cut = True
            raise Crash


class Port:
    """A proxy for a port, with a gap before and after each call."""

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
            self._thread.pass_gap(name, "before")
            result = function(*arguments, **named)
            self._thread.pass_gap(name, "after")
            return result

        return call


class LeasesPort(Port):
    def grant(self, decide: Any) -> list[Any]:
        self._thread.pass_gap("leases.grant", "before")
        granted = [Port("claim", held, self._thread) for held in self._target.grant(decide)]
        self._thread.pass_gap("leases.grant", "after")
        return granted


class StorePort(Port):
    """A proxy for the store. Transactions can also fail because the disk is full; the next one then succeeds."""

    def __init__(self, target: Any, thread: Thread, is_full: Callable[[], bool]) -> None:
        super().__init__("store", target, thread)
        self._is_full = is_full
        self._has_failed = False

    @contextlib.contextmanager
    def transaction(self, *, is_synced: bool = False) -> Iterator[None]:
        self._thread.pass_gap("store.transaction", "before")
        with self._target.transaction(is_synced=is_synced):
            self._thread.pass_gap("store.transaction", "after")
            yield
            self._thread.pass_gap("store.commit", "before")
            self._has_failed = not self._has_failed and self._is_full()
            if self._has_failed:
                raise StoreFault("the disk is full")
        self._thread.pass_gap("store.commit", "after")
