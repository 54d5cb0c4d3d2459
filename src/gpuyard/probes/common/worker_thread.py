"""A thread that makes one call at a time, for callers who will not wait longer than they said.

A call into a stuck driver cannot be interrupted. Its thread is left waiting, nothing new is given to it, and since it
is a daemon thread it does not keep the program from ending.
"""

import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class NoAnswerYet(Exception):
    """The call is still under way."""


class WorkerThread(Generic[T]):
    def __init__(self, name: str) -> None:
        self._name = name
        self._reset()

    def _reset(self) -> None:
        self._calls: SimpleQueue[Callable[[], T]] = SimpleQueue()
        self._answers: SimpleQueue[T | BaseException] = SimpleQueue()
        self._is_waiting = False
        self._pid: int | None = None

    def start(self, call: Callable[[], T]) -> bool:
        """Begins the call, or answers False: the one before it has not come back, or there can be no more threads."""
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
        """Also after a fork, which threads do not survive."""
        self._reset()
        try:
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()
        except RuntimeError:  # the system's limit on threads
            return False
        self._pid = os.getpid()
        return True

    def finish(self, timeout_s: float) -> T:
        """What the call returned or raised; NoAnswerYet where it takes longer, and then it may be asked for again."""
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
            except BaseException as error:  # noqa: BLE001 - it is raised again where the answer is taken
                answers.put(error)
