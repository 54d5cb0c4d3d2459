"""Reads the ends of logs of failed attempts, without holding up the caller.

A log of the queue is on a local disk, and is read at once. A file that the user named may be on a network disk that
hangs: a thread reads it, for 5 s at most (`read_tail`), and the end of its attempt is held back meanwhile.
"""

import threading
from collections.abc import Callable
from pathlib import Path

from gpuyard.engines.local.keeper_connection import JournalEntry
from gpuyard.engines.local.watched_attempt import WatchedAttempt


class LogReads:
    """For one thread. `wake` is called, by another thread, when `is_reading` has become False for an attempt."""

    def __init__(self, own_folder: Path, wake: Callable[[], None]) -> None:
        self._own_folder = f"{own_folder}/"
        self._wake = wake
        self._lock = threading.Lock()
        self._is_closed = False
        self._texts: dict[str, list[str] | None] = {}  # None: still being read

    def is_reading(self, watched: WatchedAttempt, entry: JournalEntry | None) -> bool:
        """Start to read the logs of an attempt that is over if they are files of the user; return whether to wait."""
        if watched.has_succeeded(entry):
            return False
        if watched.key in self._texts:
            return self._texts[watched.key] is None
        if self._are_own(watched) or not watched.outcome(entry).status:
            return False
        self._texts[watched.key] = None
        try:
            threading.Thread(target=self._read, args=(watched, entry), daemon=True).start()
        except RuntimeError:  # no more threads
            self._texts[watched.key] = watched.read_outputs(entry)
        return self._texts[watched.key] is None

    def take(self, watched: WatchedAttempt, entry: JournalEntry | None) -> list[str]:
        """Return the ends of the logs, once `is_reading` has returned False."""
        if watched.has_succeeded(entry):
            return []
        texts = self._texts.pop(watched.key, None)
        return watched.read_outputs(entry, is_local=self._are_own(watched)) if texts is None else texts

    def _are_own(self, watched: WatchedAttempt) -> bool:
        """Return whether all logs of the attempt are logs of the queue."""
        return all(log.startswith(self._own_folder) for log in (watched.log, watched.error_log) if log is not None)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True

    def _read(self, watched: WatchedAttempt, entry: JournalEntry | None) -> None:
        self._texts[watched.key] = watched.read_outputs(entry)
        with self._lock:
            if not self._is_closed:
                self._wake()
