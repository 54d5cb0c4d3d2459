"""Tables, sizes and times as plain text, for commands that cannot afford to import a library for it.

All pure. A table takes the room it is given: first the columns that can be spared go, then the long ones are cut.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

UNKNOWN = "-"
_GAP = "  "
_SHORTEST = 14
_LONGEST_UNCUT = 60


class Column:
    """`is_long` is cut where there is no room; `is_spare` goes before anything is cut to nearly nothing."""

    __slots__ = ("heading", "is_long", "is_right", "is_spare")

    def __init__(self, heading: str, *, is_right: bool = False, is_long: bool = False, is_spare: bool = False) -> None:
        self.heading = heading
        self.is_right = is_right
        self.is_long = is_long
        self.is_spare = is_spare


def lay_out(
    columns: "Sequence[Column]", rows: "Sequence[Sequence[str]]", room: int | None, ellipsis: str = "…"
) -> list[list[str]]:
    """The headings and the rows as cells of even width, in no more than `room` columns."""
    table = [[column.heading for column in columns], *([clean(cell) for cell in row] for row in rows)]
    widths = [max(cell_width(row[at]) for row in table) for at in range(len(columns))]
    kept = _keep(columns, widths, room)
    _share(columns, widths, kept, room)
    return [
        [_fill(cut(row[at], widths[at], ellipsis), widths[at], is_right=columns[at].is_right) for at in kept]
        for row in table
    ]


def line_of(cells: "Sequence[str]") -> str:
    return _GAP.join(cells).rstrip()


def _keep(columns: "Sequence[Column]", widths: list[int], room: int | None) -> list[int]:
    """The columns that stay; of those that can be spared the last go first."""
    kept = list(range(len(columns)))

    def least() -> int:
        wanted = [min(widths[at], _SHORTEST) if columns[at].is_long else widths[at] for at in kept]
        return sum(wanted) + len(_GAP) * (len(kept) - 1)

    for at in reversed(range(len(columns))):
        if room is not None and columns[at].is_spare and least() > room:
            kept.remove(at)
    return kept


def _share(columns: "Sequence[Column]", widths: list[int], kept: list[int], room: int | None) -> None:
    """Cuts the long columns' widths to what the others leave; the shorter of them is spared as long as possible."""
    long = sorted((at for at in kept if columns[at].is_long), key=lambda at: widths[at])
    if room is None:
        for at in long:
            widths[at] = widths[at] if at == kept[-1] else min(widths[at], _LONGEST_UNCUT)
        return
    left = room - sum(widths[at] for at in kept if not columns[at].is_long) - len(_GAP) * (len(kept) - 1)
    for number, at in enumerate(long):
        widths[at] = max(1, min(widths[at], left // (len(long) - number)))
        left -= widths[at]


def clean(text: str) -> str:
    """On one line, and without anything that a terminal would obey."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else " " if char.isspace() else "?" for char in text)


def cell_width(text: str) -> int:
    """How many columns a terminal uses for it."""
    if text.isascii():
        return len(text)
    return sum(map(_char_width, text))


def _char_width(char: str) -> int:
    import unicodedata

    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def cut(text: str, width: int, ellipsis: str = "…") -> str:
    if cell_width(text) <= width:
        return text
    room = width - len(ellipsis)
    kept = []
    for char in text:
        room -= cell_width(char)
        if room < 0:
            break
        kept.append(char)
    return "".join(kept) + ellipsis[:width]


def _fill(text: str, width: int, *, is_right: bool) -> str:
    padding = " " * (width - cell_width(text))
    return padding + text if is_right else text + padding


def size_text(megabytes: float | None) -> str:
    if megabytes is None:
        return UNKNOWN
    return f"{megabytes:.0f} MB" if megabytes < 1024 else f"{megabytes / 1024:.1f} GB"


def duration_text(seconds: float | None) -> str:
    """The two largest units that matter: `45s`, `3m 20s`, `4h 5m`, `2d 3h`."""
    if seconds is None:
        return UNKNOWN
    whole = max(0, int(seconds))
    for unit, below, size, part in (("d", "h", 86400, 3600), ("h", "m", 3600, 60), ("m", "s", 60, 1)):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size}{unit} {rest}{below}" if rest else f"{whole // size}{unit}"
    return f"{whole}s"


def time_text(iso: str | None) -> str:
    """A moment of an answer, on this machine's clock."""
    if iso is None:
        return UNKNOWN
    from datetime import datetime

    return f"{datetime.fromisoformat(iso).astimezone():%Y-%m-%d %H:%M:%S}"


def count_text(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def devices_text(row: "dict[str, Any]") -> str:
    """The GPUs it has or had, by their numbers; how many it wants where it has none yet."""
    if row.get("place"):
        return str(row["place"])
    if row["gpu_indexes"]:
        return ",".join("?" if index is None else str(index) for index in row["gpu_indexes"])
    return f"x{row['gpus']}" if row["gpus"] else UNKNOWN


def memory_text(row: "dict[str, Any]") -> str:
    """What it was given on each GPU; what it would be given, where it waits; else what it asked for."""
    if not row["gpus"]:
        return UNKNOWN
    known = "estimated_mb" if row["waited_s"] is not None else "reserved_mb" if row["attempt"] else "vram_mb"
    megabytes = row[known]
    return "alone" if megabytes is None else size_text(megabytes)


def result_text(row: "dict[str, Any]") -> str:
    """How it ended, or why it has not begun."""
    if row["reason"] or row["ended_at"] is None:
        return row["reason"] or ""
    return f"exit {row['status']}" if row["status"] is not None else row["outcome"] or ""
