"""Threads that sync and name finished outputs, while the workers render the next labels.

A sync waits for the disk: a millisecond, or a hundred while assets are read from the same disk. Many syncs at once wait
for the same write of the file system's journal. A thread is started only when all others wait for the disk, and a
waiting thread does not need the interpreter.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Self

_THREADS = 16  # on a disk that is busy with reads, 8 are too few for 75 labels per second (ADR 87)
_MOST_WAITING = 32  # finished labels that are not on disk yet; a worker waits if there are more


class OutputWriters:
    """Used in a `with` block, whose end waits for all writes and raises their first error."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, "gpuyard-write")
        self._free = threading.Semaphore(_MOST_WAITING)
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._pool.shutdown()
        if error is None and self._failure is not None:
            raise self._failure

    def write(self, act: Callable[[], object]) -> None:
        """Call `act` in another thread. Waits while too many writes are pending. Raises the error of an earlier one."""
        self._free.acquire()
        if self._failure is not None:
            self._free.release()
            raise self._failure
        self._pool.submit(self._call, act)

    def _call(self, act: Callable[[], object]) -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - raised again in a worker, or at the end
            self._failure = error
        finally:
            self._free.release()
