"""What is said, and where to: the terminal's size and its abilities, or a pipe's lack of them."""

import os
import sys

from gpuyard.ui.cli.text_table import Column, lay_out, line_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, TextIO

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


def is_terminal(stream: "TextIO") -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def is_unicode() -> bool:
    return (sys.stdout.encoding or "").lower().startswith("utf")


def ellipsis() -> str:
    return "…" if is_unicode() else "~"


def paint(text: str, style: str | None) -> str:
    if style is None or "NO_COLOR" in os.environ or not is_terminal(sys.stdout):
        return text
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"


def room() -> tuple[int | None, int | None]:
    """Columns and lines of the terminal. A pipe has no bounds, but COLUMNS sets one."""
    columns, lines = _number("COLUMNS"), _number("LINES")
    if is_terminal(sys.stdout):
        try:
            size = os.get_terminal_size(sys.stdout.fileno())
        except OSError:
            return columns or 80, lines or 24
        return columns or size.columns or 80, lines or size.lines or 24
    return columns, None


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isascii() and text.isdigit() and int(text) else None


def say(text: str) -> None:
    """A line for whoever asked. A letter that the terminal's encoding lacks becomes a question mark, not a crash."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(f"{text.encode(encoding, 'replace').decode(encoding)}\n")


def note(text: str) -> None:
    """A line beside the answer, on standard error, which knows how to write any letter."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def say_table(columns: "Sequence[Column]", rows: "Sequence[Sequence[str]]") -> None:
    heading, *lines = lay_out(columns, rows, room()[0], ellipsis())
    say(paint(line_of(heading), "dim"))
    for line in lines:
        say(line_of(line))


def say_json(value: "Any") -> None:
    import json

    sys.stdout.write(f"{json.dumps(value, indent=2)}\n")
