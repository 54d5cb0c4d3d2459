"""A live display on a terminal: each frame is drawn completely or not at all, also when a signal interrupts it."""

import contextlib
import signal
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self

from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from gpuyard.ui.cli.text_table import Line


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until the block ends. For the main thread only.

    A rich console that is interrupted while it flushes its buffer keeps buffering from then on, and the cursor stays
    hidden. Blocking the signals would not help: the system would deliver them to another thread.
    """
    delayed: list[int] = []
    before = {
        signum: signal.signal(signum, lambda number, _: delayed.append(number))
        for signum in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        for number in delayed:
            signal.raise_signal(number)


class LiveDisplay:
    """Keeps the last frame on the screen; after the end too, unless `live` is transient."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def __enter__(self) -> Self:
        return self  # the first `draw` starts it: an interrupt in here would skip `__exit__`

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with uninterrupted():
            self._live.stop()

    def draw_lines(self, lines: Iterable[Line]) -> None:
        texts = (Text.assemble(*((text, style or "") for text, style in line)) for line in lines)
        self.draw(Text("\n", no_wrap=True, overflow="crop").join(texts))

    def draw(self, picture: RenderableType) -> None:
        with uninterrupted():
            self._live.start()
            self._live.update(picture, refresh=True)

    def note(self, text: str) -> None:
        with uninterrupted():
            self._live.console.print(Text(text))
