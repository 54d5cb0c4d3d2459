"""Threads that read parts of assets, those of the asset that is needed first before all others.

Several assets that are read at the same speed arrive together, and late: the first label waits for all of them.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from heapq import heappop, heappush
from itertools import count


class PartReaders:
    """May be used by several threads, each with the parts of one asset."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "gpuyard-part")
        self._lock = threading.Lock()
        self._numbers = count()
        self._waiting: list[tuple[float, int, Callable[[], object], Future[None]]] = []  # a heap

    def call_all(self, place: float, acts: Sequence[Callable[[], object]]) -> None:
        """Call all, after those with lower places. Waits for all, because they write to memory that is reused if one
        fails; then raises the first error."""
        ends: list[Future[None]] = []
        with self._lock:
            for act in acts:
                ends.append(Future())
                heappush(self._waiting, (place, next(self._numbers), act, ends[-1]))
        for _ in acts:
            self._pool.submit(self._call_first)
        wait(ends)
        for end in ends:
            end.result()

    def _call_first(self) -> None:
        with self._lock:
            *_, act, end = heappop(self._waiting)
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits for it
            end.set_exception(error)
        else:
            end.set_result(None)

    def close(self) -> None:
        self._pool.shutdown()
