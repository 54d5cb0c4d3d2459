"""Threads for calls that may hang, in a driver or on a network disk, and cannot be interrupted. A thread that hangs
gets no new call, and does not keep the program from exiting."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_Call = tuple[Callable[[], Any], "asyncio.Future[Any]", asyncio.AbstractEventLoop]


class BackgroundThread:
    """Makes one call at a time. It is started with the first one. Calls may raise OSError."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._is_started = False

    def run(self, call: Callable[[], T]) -> "asyncio.Future[T]":
        """Return a future of the result. Call it in an event loop."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        if not self._is_started:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
            self._is_started = True
        self._calls.put((call, answer, loop))
        return answer

    def close(self) -> None:
        """End the thread after its present call."""
        self._calls.put(None)

    def _work(self) -> None:
        try:
            while (each := self._calls.get()) is not None:
                _make(*each)
        finally:  # a bug in a call: the next one gets another thread
            self._is_started = False


def _make(call: Callable[[], Any], answer: "asyncio.Future[Any]", loop: asyncio.AbstractEventLoop) -> None:
    result: object = None
    error: Exception | None = RuntimeError("the call raised another exception than OSError, which is a bug")

    def tell() -> None:
        if not answer.done():
            answer.set_result(result) if error is None else answer.set_exception(error)

    if answer.cancelled():
        return
    try:
        result, error = call(), None
    except OSError as raised:
        error = raised
    finally:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell)


class NoAnswerYet(Exception):
    """The call has not returned yet."""


class WorkerThread(Generic[T]):
    """Makes one call at a time, each in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._answers: SimpleQueue[T | BaseException] = SimpleQueue()
        self._asked_by: int | None = None  # the process whose call is not finished; threads do not survive a fork

    def start(self, call: Callable[[], T]) -> bool:
        """Start the call. Return False if the previous call has not returned, or no thread can be started."""
        if self._asked_by == os.getpid() and self._answers.empty():
            return False
        answers: SimpleQueue[T | BaseException] = SimpleQueue()

        def work() -> None:
            try:
                answers.put(call())
            except BaseException as error:  # noqa: BLE001 - `finish` raises it again
                answers.put(error)

        try:
            threading.Thread(target=work, name=self._name, daemon=True).start()
        except RuntimeError:  # the system's limit on threads
            return False
        self._answers, self._asked_by = answers, os.getpid()
        return True

    def finish(self, timeout_s: float) -> T:
        """Return or raise what the call did. Raise NoAnswerYet on a timeout; `finish` may be called again then."""
        try:
            answer = self._answers.get(timeout=max(0.0, timeout_s))
        except Empty:
            raise NoAnswerYet from None
        self._asked_by = None
        if isinstance(answer, BaseException):
            raise answer
        return answer
