"""ProcessSignals: finds and signals the processes of attempts in a thread.

Reading the process table takes about 50 µs per process of the machine: with thousands of them, the daemon's loop would
be held for 0.1 s and more. One reading serves all requests that wait for it.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from msgspec import Struct

from gpuyard.core.job.job import Attempt
from gpuyard.engines.local.process_tree import signal_each

_log = logging.getLogger(__name__)
# Signals the processes of attempts of one queue; returns to how many, by attempt.
SignalEach = Callable[[Sequence[Attempt], str, int], list[int]]


class _Request(Struct, frozen=True):
    attempt: Attempt
    signum: int
    send: SignalEach

    @property
    def name(self) -> tuple[str, int, SignalEach]:
        return self.attempt.key, self.signum, self.send


class ProcessSignals:
    """For one thread. `wake` is called, by another thread, when the numbers of some requests are known."""

    def __init__(self, queue: str, wake: Callable[[], None]) -> None:
        self._queue = queue
        self._wake = wake
        self._lock = threading.Lock()
        self._waiting: list[_Request] = []
        self._counts: dict[tuple[str, int, SignalEach], int | None] = {}  # None: under way
        self._thread = ThreadPoolExecutor(1, "gpuyard-signals")
        self._is_closed = False

    def signal(self, attempts: Sequence[Attempt], signum: int, send: SignalEach = signal_each) -> list[int | None]:
        """Return to how many processes of each attempt the signal was sent; None while it is under way. The first call
        sends it, and the first call after that returns the number."""
        requests = [_Request(attempt, signum, send) for attempt in attempts]
        with self._lock:
            new = [each for each in requests if each.name not in self._counts]
            self._counts.update(dict.fromkeys((each.name for each in new), None))
        self._begin(new)
        with self._lock:
            found = [self._counts.get(each.name) for each in requests]
            for each in requests:
                if self._counts.get(each.name) is not None:
                    del self._counts[each.name]
        return found

    def send(self, attempts: Sequence[Attempt], signum: int) -> None:
        """Send the signal soon, whether or not it is under way already."""
        self._begin([_Request(attempt, signum, signal_each) for attempt in attempts])

    def forget(self, key: str) -> None:
        """Drop the numbers of an attempt that is over."""
        with self._lock:
            for name in [name for name in self._counts if name[0] == key]:
                del self._counts[name]

    def close(self) -> None:
        """Send what was requested, and wait for that."""
        with self._lock:
            self._is_closed = True
        self._thread.shutdown()

    def _begin(self, requests: Sequence[_Request]) -> None:
        if not requests:
            return
        with self._lock:
            self._waiting += requests
        try:
            self._thread.submit(self._work).add_done_callback(_log_bug)
        except RuntimeError:  # no more threads
            self._work()

    def _work(self) -> None:
        """Send the signals of all requests that wait; those of one kind together."""
        with self._lock:
            requests, self._waiting = self._waiting, []
        kinds: dict[tuple[int, SignalEach], list[_Request]] = {}
        for each in requests:
            kinds.setdefault((each.signum, each.send), []).append(each)
        for (signum, send), alike in kinds.items():
            try:
                counts = send([each.attempt for each in alike], self._queue, signum)
            except BaseException:
                self._forget_all(requests)
                raise
            self._note(alike, counts)

    def _forget_all(self, requests: Sequence[_Request]) -> None:
        """Drop requests that failed: the next call sends them again."""
        with self._lock:
            for each in requests:
                if self._counts.get(each.name) is None:
                    self._counts.pop(each.name, None)

    def _note(self, requests: Sequence[_Request], counts: Sequence[int]) -> None:
        with self._lock:
            known = {
                each.name: count for each, count in zip(requests, counts, strict=True) if each.name in self._counts
            }
            self._counts.update(known)
            if known and not self._is_closed:
                self._wake()


def _log_bug(work: "Future[None]") -> None:
    if (error := work.exception()) is not None:
        _log.error("the processes of jobs could not be signalled, which is tried again", exc_info=error)
