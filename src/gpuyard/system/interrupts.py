"""Hold back signals while a resource changes hands: an exception between two steps would leave it held for good.

Python runs signal handlers in the main thread, between any two instructions, and handlers may raise: KeyboardInterrupt,
or what a script raises on SIGTERM or SIGALRM.
"""

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, TypeAlias

_Handler: TypeAlias = Callable[[int, FrameType | None], object]
_SIGNALS = (int(signal.SIGINT), int(signal.SIGTERM), int(signal.SIGALRM))
# The C module below `signal`: without its conversions to enums, which take longer than all the rest.
_fast_signal: Any = sys.modules.get("_signal", signal)


class _Deferred:
    """The handler in place of another one: keeps the signal while a block defers it, and passes it on otherwise."""

    def __init__(self, handler: _Handler, block: "DeferInterrupts") -> None:
        self.handler = handler
        self._block = block

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._block.is_active:
            self._block.pending[number] = self.handler
        else:
            self.handler(number, frame)


class DeferInterrupts:
    """Defer signals with a Python handler until the block is left. Blocks may be nested; the outermost one defers.

    Keep the block short and without waiting. In other threads than the main thread there is nothing to defer.
    """

    _outermost: "DeferInterrupts | None" = None

    def __init__(self) -> None:
        self.is_active = False
        self.pending: dict[int, _Handler] = {}
        self._replaced: list[tuple[int, _Deferred]] = []

    def __enter__(self) -> None:
        if DeferInterrupts._outermost is not None or threading.get_ident() != threading.main_thread().ident:
            return
        self.is_active = True
        try:
            for number in _SIGNALS:
                handler = _fast_signal.getsignal(number)
                if callable(handler):
                    deferred = _Deferred(handler, self)
                    self._replaced.append((number, deferred))
                    _fast_signal.signal(number, deferred)
            DeferInterrupts._outermost = self
        except BaseException:
            self._restore()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if DeferInterrupts._outermost is self:
            DeferInterrupts._outermost = None
            self._restore()

    def _restore(self) -> None:
        try:
            for number, deferred in self._replaced:
                present = _fast_signal.getsignal(number)
                if present is deferred:
                    _fast_signal.signal(number, deferred.handler)
        finally:  # a handler that was restored may have raised: those that were not pass their signals on
            self.is_active = False
        for number, handler in self.pending.items():
            handler(number, None)
