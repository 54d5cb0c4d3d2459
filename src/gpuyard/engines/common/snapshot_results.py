"""Brings the results of attempts that ran in snapshots back, before their ends are reported: jobs that wait for them,
and `gpuyard wait`, find the files in the tree.

An end is held back for 30 s at most: the disk of the tree may hang. The daemon tries again later what failed.
"""

import logging
import os
import threading
import time
from collections.abc import Callable

from msgspec import Struct

from gpuyard.engines.common.bring_results import bring_results
from gpuyard.ports import Launch

_log = logging.getLogger(__name__)
_HOLD_S = 30.0


class _Pass(Struct):
    """One look through a snapshot, for all attempts that ended before it began."""

    label: str
    done: threading.Event
    problem: str | None = None


class SnapshotResults:
    """For one thread. Keys are those of attempts, such as `17.1`."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called, from any thread, when `holds` should be called again."""
        self._wake = wake
        self._snapshots: dict[str, str] = {}  # by key
        self._passes: dict[str, tuple[_Pass, float]] = {}  # by key, and how long an end waits for it
        self._next: dict[str, _Pass] = {}  # by snapshot: the pass that has not begun
        self._mutex = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._problems: dict[str, str] = {}  # by key, of ends that are not held back any more

    def note(self, launch: Launch) -> None:
        if launch.snapshot is not None:
            self._snapshots[launch.key] = os.path.dirname(launch.snapshot.folder)

    def holds(self, key: str) -> bool:
        """Return whether the end of this attempt is held back; then call it again later."""
        snapshot = self._snapshots.get(key)
        if snapshot is None:
            return False
        if key not in self._passes:
            self._passes[key] = self._join(snapshot, f"job-{key.partition('.')[0]}"), time.monotonic() + _HOLD_S
        each, until = self._passes[key]
        if not each.done.is_set() and time.monotonic() < until:
            return True
        del self._passes[key], self._snapshots[key]
        if each.problem is not None:
            self._problems[key] = each.problem
        return False

    def take_problem(self, key: str) -> str | None:
        """Return why results of this attempt could not be brought back."""
        return self._problems.pop(key, None)

    def _join(self, snapshot: str, label: str) -> _Pass:
        with self._mutex:
            if (waiting := self._next.get(snapshot)) is not None:
                return waiting
            self._next[snapshot] = each = _Pass(label, threading.Event())
            lock = self._locks.setdefault(snapshot, threading.Lock())
        try:
            threading.Thread(target=self._run, args=(snapshot, each, lock), daemon=True).start()
        except RuntimeError:  # no more threads: the daemon brings them back later
            self._next.pop(snapshot, None)
            each.done.set()
        return each

    def _run(self, snapshot: str, each: _Pass, lock: threading.Lock) -> None:
        try:
            with lock:
                with self._mutex:
                    del self._next[snapshot]
                brought = bring_results(snapshot, each.label)
            each.problem = brought.problem
            if brought.problem is not None:
                _log.warning("results of %s stay in %s for now: %s", each.label, snapshot, brought.problem)
            for path in brought.renamed:
                _log.warning("a result of %s is %s: the file has changed in the tree, too", each.label, path)
        finally:
            each.done.set()
            try:
                self._wake()
            except (OSError, ValueError):  # the daemon ends
                _log.debug("no daemon waits for the results of %s", each.label)
