"""The characters that a terminal can show, and the output of a program as lines for a panel.

Nothing depends on colour alone: each part of a bar has its own character, each state its word. The output of a
program keeps its colours and loses all other escape sequences; a line that was overwritten is shown as on a terminal.
"""

import re
from collections import deque
from collections.abc import Mapping

from rich.ansi import AnsiDecoder
from rich.text import Text

from gpuyard.model.terminal_line import shorten_line, shown_line
from gpuyard.ui.cli.text_table import clean


def has_unicode(environment: Mapping[str, str], encoding: str) -> bool:
    """Without a locale, as in containers, trust the encoding: the terminal behind it nearly always has Unicode."""
    # The fonts of these have only some of the block characters, and which ones is unknown.
    is_plain = environment.get("TERM", "").startswith(("linux", "vt", "ansi", "cons25"))
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        value = environment.get(name, "")
        # Python itself sets C.UTF-8 if the locale is C, for its own files.
        is_pythons = name == "LC_CTYPE" and value == "C.UTF-8" and environment.get("LANG") in ("C", "POSIX")
        if value and not is_pythons:
            is_plain = is_plain or "utf" not in value.lower()
            break
    return not is_plain and encoding.lower().startswith("utf")


def has_colour(environment: Mapping[str, str]) -> bool:
    return "NO_COLOR" not in environment and not environment.get("TERM", "").startswith("vt")


_LONGEST_LINE = 4096
# Titles, links and other commands to the terminal.
_ORDERS = re.compile("\x1b[\\]P^_][^\x07\x1b]*(?:\x1b\\\\|\x07)?")


class LogText:
    """The last 5,000 lines, each with whether it is standard error; the last one of each stream may be incomplete."""

    def __init__(self) -> None:
        self._lines: deque[tuple[str, bool]] = deque(maxlen=4999)
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
        text.stylize_before("magenta")
    return text
