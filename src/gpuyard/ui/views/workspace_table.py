"""A workspace as people see it: a row per config, how far all of them are, and what the next one waits for.

All pure: lines of styled texts, which fit the frame they are made for. In a narrow frame the least needed columns go
first; in a low one the rows that say least are only counted. Names and logs are data: nothing in them is obeyed.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from gpuyard.core.units import UNKNOWN, format_duration, format_size
from gpuyard.recipes.workspace.sweep_status import ConfigStatus, SweepStatus
from gpuyard.ui.cli.text_table import Column, cell_width, clean, cut, lay_out

Span = tuple[str, str | None]
Line = tuple[Span, ...]

_GAP = 2
_STATES = {
    "running": ("●", "green"),
    "finishing": ("◍", "green"),
    "stopping": ("◍", "yellow"),
    "suspended": ("◐", "yellow"),
    "failed": ("✗", "red"),
    "pending": ("◔", "green"),
    "retrying": ("◌", "yellow"),
    "held": ("‖", "yellow"),
    "waiting": ("○", None),
    "stopped": ("-", "yellow"),
    "completed": ("✓", "dim"),
    "not started": ("·", "dim"),
}
# What is told first where not all can be.
_RANKS = {state: rank for rank, state in enumerate(_STATES)}
_STATE, _LAST = 1, "LAST LINE"
_COLUMNS = {
    "CONFIG": Column("CONFIG"),
    "STATE": Column("STATE"),
    "GPU": Column("GPU"),
    "TIME": Column("TIME", is_right=True),
    "MEMORY": Column("MEMORY", is_right=True),
    "TRY": Column("TRY", is_right=True),
    "SESSION": Column("SESSION"),
    _LAST: Column(_LAST, is_long=True),
}
_LEAST_NEEDED = ("TRY", "MEMORY", _LAST, "GPU", "TIME")
_SHORTEST_CONFIG, _SHORTEST_LAST, _GOOD_LAST = 16, 12, 24
_LONGEST_CONFIG, _LONGEST_BAR = 48, 60
_MOST_FAILURES = 3
# Colours, titles and links that a program wrote for a terminal.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_()][0-9A-Z]?)")


class TableSize(Struct, frozen=True, kw_only=True):
    """Where it is shown; `None` where there is no bound. Symbols are for terminals."""

    columns: int | None = None
    lines: int | None = None
    is_unicode: bool = True
    has_symbols: bool = True

    @property
    def ellipsis(self) -> str:
        return "…" if self.is_unicode else "~"


def picture_of(standing: SweepStatus, frame: TableSize) -> list[Line]:
    head = _head(standing, frame)
    tail = _tail(standing, frame)
    if not standing.rows:
        return [*head, *_wrapped("There is no config in it yet.", None, frame), *tail]
    # Beside the rows: the headings, and the line that the cursor is on.
    room = None if frame.lines is None else max(2, frame.lines - len(head) - len(tail) - 2)
    shown, others = _most_telling(standing.rows, room)
    return [*head, *_table(shown, frame), *_counted(others, frame), *tail]


def summary_of(standing: SweepStatus, frame: TableSize) -> str:
    """How far it is, in one line."""
    return _dot(frame).join(text for text, _ in _facts(standing))


def changes_of(before: SweepStatus, now: SweepStatus) -> list[str]:
    """What has become of tasks since."""
    known = {row.config: (row.state, row.attempt) for row in before.rows}
    return [_change(row) for row in now.rows if known.get(row.config) != (row.state, row.attempt)]


def _change(row: ConfigStatus) -> str:
    gpu = f"GPU {row.gpu}" if row.gpu is not None and row.gpu[:1] in "?0123456789" else row.gpu
    where = f" on {gpu}" if row.state == "running" and gpu is not None else ""
    again = f", attempt {row.attempt}" if row.state == "running" and row.attempt > 1 else ""
    return clean(f"{row.config} {row.state}{where}{again}")


# Above and below the table


def _head(standing: SweepStatus, frame: TableSize) -> list[Line]:
    name = clean(standing.task_name)
    if frame.columns is None:
        return [((name, "bold"), ("  ", None), (clean(standing.workspace), "dim"))]
    name = cut(name, frame.columns, frame.ellipsis)
    left = frame.columns - cell_width(name) - _GAP
    place = (("  ", None), (_cut_middle(clean(standing.workspace), left, frame), "dim")) if left >= _GAP else ()
    return [((name, "bold"), *place)]


def _tail(standing: SweepStatus, frame: TableSize) -> list[Line]:
    lines: list[Line] = []
    if standing.rows:
        lines += [(), _bar(standing, frame), *_flow(_facts(standing), _dot(frame), frame)]
    for text, style in _remarks(standing):
        lines += _wrapped(text, style, frame)
    return lines


def _facts(standing: SweepStatus) -> list[Span]:
    """Each with its style; what there is none of is left out."""
    counted: list[Span] = [(f"{standing.completed:,} of {standing.total:,} done", "bold")]
    counts = Counter(row.state for row in standing.rows)
    for count, what, style in (
        (standing.running, "running", "green"),
        (standing.waiting, "waiting", None),
        (standing.failed, "failed", "red"),
        (counts["stopped"], "stopped", "yellow"),
        (counts["not started"], "not started", "dim"),
    ):
        counted += [(f"{count:,} {what}", style)] if count else []
    return counted if standing.is_over else [*counted, (_time_left(standing), "dim")]


def _time_left(standing: SweepStatus) -> str:
    if standing.left_s is not None:
        return f"about {format_duration(standing.left_s)} left"
    return "time left unknown" if standing.completed else "time left unknown until one has finished"


def _remarks(standing: SweepStatus) -> Iterator[Span]:
    if standing.is_stopped and standing.completed < standing.total:
        still = "what runs comes to its end, and " if standing.running else ""
        yield f"Stopped: {still}nothing new starts; `start` goes on.", "yellow"
    if standing.why is not None and standing.waiting:
        yield clean(standing.why), "yellow" if standing.is_paused else "dim"
    failed = [row for row in standing.rows if row.state == "failed"]
    for row in failed[:_MOST_FAILURES]:
        if row.log is not None:
            yield clean(f"{row.config} failed: its log is {row.log}"), "red"
    running = next((row.session for row in standing.rows if row.state == "running" and row.session), None)
    if running is not None:
        yield f"to see one at work: tmux attach -t {clean(running)}", "dim"
    for note in standing.notes:
        yield clean(note), "yellow"


def _bar(standing: SweepStatus, frame: TableSize) -> Line:
    percent = f"{100 * standing.completed // standing.total}%"
    width = _LONGEST_BAR if frame.columns is None else min(_LONGEST_BAR, frame.columns - len("  100%"))
    done, running, failed, rest = ("█", "▒", "✗", "░") if frame.is_unicode else ("#", "=", "x", ".")
    parts = (
        (standing.completed, done, "green"),
        (standing.failed, failed, "red"),
        (standing.running, running, "green"),
    )
    spans, drawn, counted = list[Span](), 0, 0
    for count, block, style in parts:
        counted += count
        until = max(0, width) * counted // standing.total
        spans.append((block * (until - drawn), style))
        drawn = until
    return (*spans, (rest * (width - drawn), "dim"), ("  ", None), (percent, None))


# The table


def _most_telling(
    rows: Sequence[ConfigStatus], room: int | None
) -> tuple[Sequence[ConfigStatus], Sequence[ConfigStatus]]:
    """As many as there is room for, in their order, and the others; a line is kept to count those."""
    if room is None or len(rows) <= room:
        return rows, ()
    by_rank = sorted(range(len(rows)), key=lambda at: _RANKS[rows[at].state])
    return [rows[at] for at in sorted(by_rank[: room - 1])], [rows[at] for at in by_rank[room - 1 :]]


def _counted(rows: Sequence[ConfigStatus], frame: TableSize) -> list[Line]:
    if not rows:
        return []
    told = ", ".join(f"{count:,} {state}" for state, count in Counter(row.state for row in rows).items())
    return [((cut(f"and {told}", frame.columns or len(told) + 4, frame.ellipsis), "dim"),)]


def _table(rows: Sequence[ConfigStatus], frame: TableSize) -> list[Line]:
    cells = [_cells(row, frame) for row in rows]
    widths = {name: max(len(name), *(cell_width(each[name]) for each in cells)) for name in _COLUMNS}
    widths["CONFIG"] = min(widths["CONFIG"], _LONGEST_CONFIG)
    _fit(widths, frame.columns)
    for each in cells:
        each["CONFIG"] = _cut_middle(each["CONFIG"], widths["CONFIG"], frame)
    columns = [_COLUMNS[name] for name in widths]
    heading, *lines = lay_out(
        columns, [[each[name] for name in widths] for each in cells], frame.columns, frame.ellipsis
    )
    return [_joined([(cell, "dim") for cell in heading]), *map(_row_line, rows, lines)]


def _fit(widths: dict[str, int], room: int | None) -> None:
    """Takes columns out of `widths` until the rest fits, then cuts the config's."""
    if room is None:
        return

    def spare(config: int, last: int = _SHORTEST_LAST) -> int:
        too_long = max(0, widths[_LAST] - last) if _LAST in widths else 0
        return room - sum(widths.values()) + widths["CONFIG"] - config + too_long - _GAP * (len(widths) - 1)

    # What tells configs apart is often at their end, so a session goes before a name is cut.
    if spare(widths["CONFIG"], _GOOD_LAST) < 0:
        del widths["SESSION"]
    for name in _LEAST_NEEDED:
        if spare(min(widths["CONFIG"], _SHORTEST_CONFIG)) < 0:
            del widths[name]
    widths["CONFIG"] = max(1, min(widths["CONFIG"], spare(0)))


def _cells(row: ConfigStatus, frame: TableSize) -> dict[str, str]:
    symbol = f"{_STATES[row.state][0]} " if frame.has_symbols and frame.is_unicode else ""
    return {
        "CONFIG": clean(row.config),
        "STATE": f"{symbol}{row.state}",
        "GPU": clean(row.gpu or UNKNOWN),
        "TIME": format_duration(row.seconds),
        "MEMORY": format_size(row.memory_mb),
        "TRY": str(row.attempt) if row.attempt else UNKNOWN,
        "SESSION": clean(row.session or UNKNOWN),
        _LAST: _last_text(row, frame),
    }


def _last_text(row: ConfigStatus, frame: TableSize) -> str:
    """What is remarkable comes before what it wrote."""
    written = None if row.last_line is None else _ESCAPES.sub("", row.last_line).strip()
    return _dot(frame).join(clean(text) for text in (row.note, written) if text)


def _row_line(row: ConfigStatus, cells: Sequence[str]) -> Line:
    style = _STATES[row.state][1]
    return _joined([(cell, style if at == _STATE else None) for at, cell in enumerate(cells)])


# Lines


def _joined(spans: Iterable[Span]) -> Line:
    """With gaps between them, and nothing but what is seen at the end."""
    line = [part for span in spans for part in ((" " * _GAP, None), span)][1:]
    while line and not line[-1][0].strip():
        line.pop()
    return (*line[:-1], (line[-1][0].rstrip(), line[-1][1])) if line else ()


def _dot(frame: TableSize) -> str:
    return " · " if frame.is_unicode else ", "


def _wrapped(text: str, style: str | None, frame: TableSize) -> list[Line]:
    """By words; one that is longer than a line is broken, since a path is of no use without its end."""
    words = [piece for word in text.split(" ") for piece in _broken(word, frame.columns)]
    return _flow([(word, style) for word in words], " ", frame)


def _broken(word: str, width: int | None) -> Iterator[str]:
    while width is not None and cell_width(word) > width:
        piece = cut(word, width, "") or word[0]
        yield piece
        word = word[len(piece) :]
    yield word


def _flow(pieces: Sequence[Span], gap: str, frame: TableSize) -> list[Line]:
    """On as many lines as they take."""
    lines: list[list[Span]] = []
    left = 0
    for piece, style in pieces:
        needed = cell_width(gap) + cell_width(piece)
        if lines and (frame.columns is None or needed <= left):
            lines[-1] += [(gap, "dim"), (piece, style)]
            left -= needed
        else:
            lines.append([(piece, style)])
            left = (frame.columns or 0) - cell_width(piece)
    return [tuple(line) for line in lines]


def _cut_middle(text: str, width: int, frame: TableSize) -> str:
    """Both ends of a name or a path tell more than its middle."""
    if cell_width(text) <= width:
        return text
    tail = ""
    for char in reversed(text):
        if cell_width(char + tail) > (width - 1) // 2:
            break
        tail = char + tail
    return cut(text, width - cell_width(tail), frame.ellipsis) + tail
