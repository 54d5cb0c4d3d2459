"""Splits what a program prints into the lines that it draws, with the row of each on an imagined terminal.

Progress bars are drawn over each other: a carriage return starts a line anew, `ESC[A` goes back to a bar further up.
Rows only compare lines with each other: a bar that is drawn one row below another one, and from which the cursor goes
back up, is a bar inside the other.
"""

import itertools
import re
from collections.abc import Iterator

from msgspec import Struct

MOST_LINES = 400
LONGEST_LINE = 1000
_BREAK = re.compile("(\r?\n|\r|\b+|\x1b\\[\\d*A|\x1b\\[[\\d;]*[Hf])")
_ESCAPE = re.compile("\x1b(?:\\[[0-?]*[ -/]*[@-~]|[\\]P^_][^\x07\x1b]*(?:\x07|\x1b\\\\)?|[@-OQ-Z\\\\78=>])")
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f]")


class DrawnLine(Struct, frozen=True):
    """A line without colours. `moves_up_to` is the row to which the cursor went back after it, or None."""

    text: str
    row: int
    moves_up_to: int | None = None


def drawn_lines(text: str, row: int) -> tuple[list[DrawnLine], int, str]:
    """Return the last drawn lines of a text that begins in `row`, the row of its last line, and that line as it is:
    more may be written to it. Of a line that is drawn again and again in place, the last drawing alone counts."""
    lines: list[DrawnLine] = []
    last = ""
    for piece, is_break in _pieces(text):
        if not is_break:
            last = piece
            lines.append(DrawnLine(plain_text(piece), row))
            continue
        if piece.endswith("\n"):
            row, last = row + 1, ""
        elif piece.endswith("A"):
            drawn = lines.pop() if lines else DrawnLine("", row)
            row, last = row - int(piece[2:-1][:4] or 1), ""
            lines.append(DrawnLine(drawn.text, drawn.row, row))
        else:
            last = ""
    return _without_redrawn(lines)[-MOST_LINES:], row, last[-LONGEST_LINE:]


def plain_text(text: str) -> str:
    """Return a line without escape sequences and control characters, at most 1000 characters of it."""
    text = text[: 4 * LONGEST_LINE]
    if "\x1b" in text:
        text = _ESCAPE.sub("", text)
    return _CONTROL.sub("", text)[:LONGEST_LINE]


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    for number, piece in enumerate(_BREAK.split(text)):
        if piece:
            yield piece, number % 2 == 1


def _without_redrawn(lines: list[DrawnLine]) -> list[DrawnLine]:
    """Drop empty lines, and those that the next one overwrites in place. The last line may not be whole yet: what it
    overwrites stays."""
    lines = [line for line in lines if line.moves_up_to is not None or line.text.strip()]
    kept = [
        line for line, after in itertools.pairwise(lines[:-1]) if line.moves_up_to is not None or after.row != line.row
    ]
    return [*kept, *lines[-2:]]
