"""The local engine's journal: parses the lines that keepers write when attempts start and end.

Lines look like `17.1 4242 began .` and `17.1 4242 0 4301 1700000000.123 .`: the attempt's key, the keeper's pid, and a
word or the program's exit status with its pid and the time. The keeper's pid is part of it because an attempt that
never started may be prepared again under the same key. A line that a full disk cut off lacks its dot or runs into the
next line; it is ignored.
"""

import re
from collections.abc import Iterator

from msgspec import Struct

HELLO = "hello"
_LINE = re.compile(rb"([0-9]+\.[0-9]+) ([0-9]+) ([0-9]+|[a-z-]+)(?: ([0-9]+)(?: ([0-9]+\.[0-9]+))?)? \.")


class JournalEntry(Struct, frozen=True):
    """`word` is a word or an exit status. `pid` is the program's and `at` the time of its end, if it ran."""

    key: str
    keeper: int
    word: str
    pid: int | None = None
    at: float | None = None


def parse(text: bytes) -> tuple[list[JournalEntry], int]:
    """Return the entries of all complete lines, and the length of those lines."""
    end = text.rfind(b"\n") + 1
    return list(_entries(text[:end])), end


def _entries(lines: bytes) -> Iterator[JournalEntry]:
    for line in lines.split(b"\n"):
        match = _LINE.fullmatch(line)
        if match is not None:
            pid = int(match[4]) if match[4] is not None else None
            at = float(match[5]) if match[5] is not None else None
            yield JournalEntry(match[1].decode(), int(match[2]), match[3].decode(), pid, at)
