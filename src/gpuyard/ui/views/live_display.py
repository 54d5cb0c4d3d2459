"""Displays of progress: live on a terminal, or as lines on standard error, and the parts that they have in common.

A live frame is drawn completely or not at all, also when a signal interrupts it.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Self

from rich.console import RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gpuyard.core.units import format_duration
from gpuyard.ui.cli.terminal import note
from gpuyard.ui.cli.text_table import Line

_LONGEST_NAME = 24


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

    def __exit__(self, *_: object) -> None:
        with uninterrupted():
            self._live.stop()

    def draw_lines(self, lines: Iterable[Line]) -> None:
        self.draw(as_text(lines))

    def draw(self, picture: RenderableType) -> None:
        with uninterrupted():
            self._live.start()
            self._live.update(picture, refresh=True)

    def note(self, text: str) -> None:
        with uninterrupted():
            self._live.console.print(Text(text))


class PlainDisplay:
    """Prints lines, the first one after `first_s` seconds, and then at most one every `every_s` seconds."""

    def __init__(self, first_s: float, every_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._every_s = now, every_s
        self._due_at = now() + first_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def is_due(self) -> bool:
        return self._now() >= self._due_at

    def draw(self, line: str) -> None:
        self._due_at = self._now() + self._every_s
        note(line)

    def note(self, text: str) -> None:
        note(text)


def progress_head(done: int, total: int, noun: str, style: str, name: str | None = None) -> Table:
    """Return a line with a bar between the name and `12 of 20 NOUN`."""
    head = Table.grid(padding=(0, 2, 0, 0), expand=True)
    if name is not None:
        head.add_column(no_wrap=True, overflow="ellipsis", max_width=_LONGEST_NAME)
    head.add_column(ratio=1)
    head.add_column(no_wrap=True, justify="right")
    cells = (progress_bar(done, total, style), Text(f"{done:,} of {total:,} {noun}"))
    head.add_row(*cells if name is None else (Text(name, style="bold"), *cells))
    return head


def progress_bar(completed: int, total: int, style: str, width: int | None = None) -> ProgressBar:
    return ProgressBar(max(1, total), completed, width, complete_style=style, finished_style=style, style="dim")


def time_text(elapsed_s: float, left_s: float | None) -> str:
    left = "" if left_s is None else f", about {format_duration(left_s)} left"
    return f"{format_duration(elapsed_s)}{left}"


def as_text(lines: Iterable[Line]) -> Text:
    texts = (Text.assemble(*((text, style or "") for text, style in line)) for line in lines)
    return Text("\n", no_wrap=True, overflow="crop").join(texts)


def one_line(text: str = "", style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")
