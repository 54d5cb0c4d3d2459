"""Displays of progress: lines that are drawn in place on a terminal, or printed from time to time into a pipe.

Each frame is one write, and the cursor stays visible: an interrupt leaves nothing to restore."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self, TextIO

from gpuyard.model.units import format_duration
from gpuyard.ui.cli.terminal import is_terminal, note, styled, window_size
from gpuyard.ui.cli.text_table import Line, clean, cut_line, spell
from gpuyard.ui.views import Frame, bar


class LiveDisplay:
    """Draws lines on a terminal in place of those before. Several threads may use it."""

    def __init__(self, stream: TextIO, *, is_transient: bool = False) -> None:
        """With `is_transient` the last lines are removed at the end."""
        self._stream, self._is_transient = stream, is_transient
        self._drawn: list[str] = []
        self._lock = threading.RLock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._drawn and self._is_transient:
                self._write([])
            elif self._drawn:
                self._print("\n")
            self._drawn = []

    def frame(self) -> Frame:
        columns, lines = window_size(self._stream)
        return Frame(width=columns, height=lines)

    def draw(self, lines: Iterable[Line]) -> None:
        frame = self.frame()
        shown = [cut_line(line, frame.columns) for line in lines]
        self._write(["".join(styled(text, style) for text, style in line) for line in shown])

    def show(self, picture: Callable[[Frame], Iterable[Line]], _line: str, _facts: object = None) -> None:
        self.draw(picture(self.frame()))

    def note(self, text: str) -> None:
        self.print_above(self._stream, f"{clean(text)}\n")

    def print_above(self, stream: TextIO, text: str) -> None:
        """Write whole lines to a stream of the same terminal, above the lines that are drawn."""
        with self._lock:
            before = self._drawn
            self._write([])
            stream.write(text)
            stream.flush()
            self._write(before)

    def _write(self, lines: list[str]) -> None:
        with self._lock:
            up = f"\x1b[{len(self._drawn) - 1}A" if len(self._drawn) > 1 else ""
            self._drawn = lines
            self._print(f"\r{up}\x1b[J" + "\n".join(lines))

    def _print(self, text: str) -> None:
        self._stream.write(spell(text, self._stream.encoding or "utf-8"))
        self._stream.flush()


class _PrintedAbove:
    """Stands for a stream of the terminal: what is written to it appears above the lines of a display."""

    def __init__(self, display: LiveDisplay, stream: TextIO) -> None:
        self._display, self._stream, self.rest = display, stream, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        lines, newline, self.rest = (self.rest + text).rpartition("\n")
        if newline:
            self._display.print_above(self._stream, f"{lines}\n")
        return len(text)


@contextlib.contextmanager
def printing_above(display: LiveDisplay) -> Iterator[None]:
    """Keep what this process prints to its terminal above the lines of the display."""
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    above = {name: _PrintedAbove(display, stream) for name, stream in before.items() if stream and stream.isatty()}
    for name, stream in above.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in above.items():
            if stream.rest:
                stream.write("\n")
            setattr(sys, name, before[name])


class PlainDisplay:
    """Prints a line, the first one after `first_s` seconds, and then at most one every `every_s` seconds. `facts` have
    to differ from those of the line before, if there are any."""

    def __init__(self, first_s: float, every_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._every_s, self._due_at = now, every_s, now() + first_s
        self._shown: object = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def show(self, _picture: Callable[[Frame], Iterable[Line]], line: str, facts: object = None) -> None:
        if self._now() >= self._due_at and (facts is None or facts != self._shown):
            self._shown, self._due_at = facts, self._now() + self._every_s
            note(line)

    def note(self, text: str) -> None:
        note(text)


def progress_display(first_s: float, every_s: float) -> LiveDisplay | PlainDisplay:
    """Return a display on standard error: lines that are drawn in place, or in a pipe lines from time to time."""
    return LiveDisplay(sys.stderr, is_transient=True) if is_terminal(sys.stderr) else PlainDisplay(first_s, every_s)


def progress_head(name: str, share: float, text: str, style: str, frame: Frame) -> Line:
    shown = cut_line(((name, "bold"), ("  ", None)), 24) if name else ()
    taken = sum(len(part) for part, _ in shown) + len(text) + 3
    full, empty = bar(share, max(1, frame.columns - taken))
    return (*shown, (full, style), (empty, "dim"), (f"  {text}", None))


def time_text(elapsed_s: float, left_s: float | None) -> str:
    left = "" if left_s is None else f", about {format_duration(left_s)} left"
    return f"{format_duration(elapsed_s)}{left}"
