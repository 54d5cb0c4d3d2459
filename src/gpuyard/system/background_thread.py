"""A thread for calls that may hang, such as on a network disk: a hanging call holds up only later ones of this thread,
and does not keep the program from exiting."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

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
    if answer.cancelled():
        return
    result: object = None
    error: Exception | None = RuntimeError("the call raised another exception than OSError, which is a bug")
    try:
        result, error = call(), None
    except OSError as raised:
        error = raised
    finally:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(_set, answer, result, error)


def _set(answer: "asyncio.Future[Any]", result: object, error: Exception | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)
