"""What a program wrote, as lines that a panel can show.

Colours are kept; whatever else a terminal would obey is not. A line that was written over, as progress bars do, shows
what was written last.
"""

import re
from collections import deque

from rich.ansi import AnsiDecoder
from rich.text import Text

from gpuyard.ui.cli.text_table import clean

_MOST_LINES = 5000
_LONGEST_LINE = 4096
# Titles, links and the like: whatever they say is not for this terminal.
_ORDERS = re.compile("\x1b[\\]P^_][^\x07\x1b]*(?:\x1b\\\\|\x07)?")


class LogText:
    """The last lines of it; the last one may not be whole yet."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque([""], maxlen=_MOST_LINES)
        self.dropped = 0

    def __len__(self) -> int:
        """Without the line that has not begun yet."""
        return len(self._lines) - (not self._lines[-1])

    def feed(self, text: str) -> None:
        first, *others = text.replace("\r\n", "\n").split("\n")
        self._lines[-1] = (self._lines[-1] + first)[-_LONGEST_LINE:]
        self.dropped += max(0, len(self._lines) + len(others) - _MOST_LINES)
        self._lines.extend(line[-_LONGEST_LINE:] for line in others)

    def lines(self, start: int, count: int) -> list[Text]:
        """Those seen from there on, as they are to be shown."""
        return [_decode(self._lines[at]) for at in range(max(0, start), min(len(self), start + count))]


def _decode(line: str) -> Text:
    text = AnsiDecoder().decode_line(_written_last(_ORDERS.sub("", line)))
    text.expand_tabs(8)
    if text.plain.isprintable():
        return text
    spans = text.spans
    shown = Text("".join(map(clean, text.plain)))
    shown.spans = spans
    return shown


def _written_last(line: str) -> str:
    return next((part for part in reversed(line.split("\r")) if part), "")
