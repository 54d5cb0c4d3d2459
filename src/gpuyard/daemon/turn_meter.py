"""MeteredLoop: an event loop that measures its turns. While a turn runs, no request is answered and no job starts.

A turn lasts from the moment at which the loop stops waiting for events to the moment at which it waits again.
"""

import asyncio
import selectors
import time
from collections.abc import Callable
from typing import Any


class TurnMeter(selectors.DefaultSelector):
    """A selector that reports the seconds of each turn to `listeners`. They are called before the loop waits."""

    def __init__(self) -> None:
        super().__init__()
        self.listeners: list[Callable[[float], None]] = []
        self._began: float | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, Any]]:
        if self._began is not None:
            seconds = time.perf_counter() - self._began
            for listener in self.listeners:
                listener(seconds)
        try:
            return super().select(timeout)
        finally:
            self._began = time.perf_counter()


class MeteredLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.turns = TurnMeter()
        super().__init__(self.turns)
