"""The output of a program as lines for a panel; standard error that has a file of its own in another colour.

Keeps colours and drops all other escape sequences. A line that was overwritten, as by progress bars, is shown as on a
terminal (`core/terminal_line.py`).
"""

import re
from collections import deque

from rich.ansi import AnsiDecoder
from rich.text import Text

from gpuyard.core.terminal_line import shorten_line, shown_line
from gpuyard.ui.cli.text_table import clean

_MOST_LINES = 5000
_LONGEST_LINE = 4096
_STDERR_STYLE = "magenta"
# Titles, links and other commands to the terminal.
_ORDERS = re.compile("\x1b[\\]P^_][^\x07\x1b]*(?:\x1b\\\\|\x07)?")


class LogText:
    """The last 5,000 lines, each with whether it is standard error; the last one of each stream may be incomplete."""

    def __init__(self) -> None:
        self._lines: deque[tuple[str, bool]] = deque(maxlen=_MOST_LINES - 1)
        self._incomplete = {False: "", True: ""}

    def __len__(self) -> int:
        return len(self._lines) + sum(map(bool, self._incomplete.values()))

    def feed(self, text: str, *, is_stderr: bool = False) -> None:
        *complete, last = (self._incomplete[is_stderr] + text.replace("\r\n", "\n")).split("\n")
        self._lines.extend((_limited(line), is_stderr) for line in complete)
        self._incomplete[is_stderr] = _limited(last)

    def separate(self, line: str) -> None:
        if self._incomplete[True]:
            self.feed("\n", is_stderr=True)
        self.feed(f"\n{line}\n")

    def __getitem__(self, part: slice) -> list[Text]:
        last = [(line, is_stderr) for is_stderr, line in self._incomplete.items() if line]
        return [_decode(line, is_stderr=is_stderr) for line, is_stderr in [*self._lines, *last][part]]


def _limited(line: str) -> str:
    return line if len(line) <= _LONGEST_LINE else shorten_line(line)[-_LONGEST_LINE:]


def _decode(line: str, *, is_stderr: bool) -> Text:
    text = AnsiDecoder().decode_line(shown_line(_ORDERS.sub("", line)))
    text.expand_tabs(8)
    if not text.plain.isprintable():
        text.plain = "".join(map(clean, text.plain))  # of the same length, so that the colours stay in place
    if is_stderr:
        text.stylize_before(_STDERR_STYLE)
    return text
