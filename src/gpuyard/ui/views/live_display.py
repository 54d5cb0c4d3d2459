"""A picture that is kept in place on a terminal, and drawn whole or not at all whenever it is interrupted."""

import contextlib
import signal
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from rich.console import RenderableType
from rich.live import Live
from rich.text import Text


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C, and what ends us, waits until it is done. For the main thread.

    A console of rich's that is interrupted as it lets go of what it has gathered keeps all it is told from then on, and
    so the cursor stays hidden. The signals are not blocked instead: they would find another thread.
    """
    heard: list[int] = []
    before = {
        signum: signal.signal(signum, lambda told, _: heard.append(told)) for signum in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        for number in heard:
            signal.raise_signal(number)


class LiveDisplay:
    """What was drawn last stays until it ends, and after that where `live` is not transient."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def __enter__(self) -> Self:
        return self  # it begins with what is drawn first: what is interrupted here would have no `__exit__`

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with uninterrupted():
            self._live.stop()

    def draw(self, picture: RenderableType) -> None:
        with uninterrupted():
            self._live.start()
            self._live.update(picture, refresh=True)

    def note(self, text: str) -> None:
        with uninterrupted():
            self._live.console.print(Text(text))
