"""The output of a program as lines for a panel.

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
# Titles, links and other commands to the terminal.
_ORDERS = re.compile("\x1b[\\]P^_][^\x07\x1b]*(?:\x1b\\\\|\x07)?")


class LogText:
    """The last 5,000 lines; the last one may be incomplete."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque([""], maxlen=_MOST_LINES)

    def __len__(self) -> int:
        """Return the number of lines, without an empty last one."""
        return len(self._lines) - (not self._lines[-1])

    def feed(self, text: str) -> None:
        first, *others = text.replace("\r\n", "\n").split("\n")
        self._lines[-1] = _limited(self._lines[-1] + first)
        self._lines.extend(map(_limited, others))

    def __getitem__(self, part: slice) -> list[Text]:
        """Return the lines of this part, decoded."""
        return [_decode(self._lines[at]) for at in range(*part.indices(len(self)))]


def _limited(line: str) -> str:
    return line if len(line) <= _LONGEST_LINE else shorten_line(line)[-_LONGEST_LINE:]


def _decode(line: str) -> Text:
    text = AnsiDecoder().decode_line(shown_line(_ORDERS.sub("", line)))
    text.expand_tabs(8)
    if not text.plain.isprintable():
        text.plain = "".join(map(clean, text.plain))  # of the same length, so that the colours stay in place
    return text
