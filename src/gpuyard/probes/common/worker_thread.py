"""A thread that makes one call at a time, so that the caller can wait with a timeout.

A call into a stuck driver cannot be interrupted. Its thread is left waiting and gets no new call. It is a daemon
thread, so it does not keep the program from exiting.
"""

import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class NoAnswerYet(Exception):
    """The call has not returned yet."""


class WorkerThread(Generic[T]):
    def __init__(self, name: str) -> None:
        self._name = name
        self._reset()

    def _reset(self) -> None:
        """Forget the thread; also needed after a fork, which threads do not survive."""
        self._calls: SimpleQueue[Callable[[], T]] = SimpleQueue()
        self._answers: SimpleQueue[T | BaseException] = SimpleQueue()
        self._is_waiting = False
        self._pid: int | None = None

    def start(self, call: Callable[[], T]) -> bool:
        """Start the call. Return False if the previous call has not returned, or no thread can be started."""
        if self._pid != os.getpid() and not self._start_thread():
            return False
        if self._is_waiting and self._answers.empty():
            return False
        if self._is_waiting:
            self._answers.get()
        self._is_waiting = True
        self._calls.put(call)
        return True

    def _start_thread(self) -> bool:
        self._reset()
        try:
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()
        except RuntimeError:  # the system's limit on threads
            return False
        self._pid = os.getpid()
        return True

    def finish(self, timeout_s: float) -> T:
        """Return or raise what the call did. Raise NoAnswerYet on a timeout; `finish` may be called again then."""
        try:
            answer = self._answers.get(timeout=max(0.0, timeout_s))
        except Empty:
            raise NoAnswerYet from None
        self._is_waiting = False
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _serve(self) -> None:
        calls, answers = self._calls, self._answers
        while True:
            call = calls.get()
            try:
                answers.put(call())
            except BaseException as error:  # noqa: BLE001 - `finish` raises it again
                answers.put(error)
