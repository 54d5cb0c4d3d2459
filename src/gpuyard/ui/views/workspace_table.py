"""The status of a workspace as lines: a row per config, the progress of all, and what the next one waits for. Pure.

A narrow table drops the least needed columns, a low one only counts the least important rows."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence

from gpuyard.model.terminal_line import ESCAPES
from gpuyard.model.units import UNKNOWN, format_duration, format_size
from gpuyard.recipes.workspace.sweep_status import NO_MARKER, ConfigStatus, SweepStatus
from gpuyard.ui.cli.text_table import (
    Column,
    Line,
    Span,
    cell_width,
    clean,
    cut,
    cut_middle,
    lay_out_lines,
    make_columns,
)
from gpuyard.ui.views import Frame

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
    NO_MARKER: ("?", "yellow"),
    "completed": ("✓", "dim"),
    "not started": ("·", "dim"),
}
_SPARE = ("GPU", "TIME", "MEMORY", "TRY", "SESSION")
_COLUMNS = (
    Column("CONFIG"),
    Column("STATE"),
    *make_columns(*_SPARE, right=("TIME", "MEMORY", "TRY"), spare=_SPARE),
    Column("LAST LINE", is_long=True),
)
_MOST_NAMED = 3


def picture_of(status: SweepStatus, frame: Frame) -> list[Line]:
    name = cut(clean(status.task_name), frame.columns)
    left = frame.columns - cell_width(name) - 2
    folder = cut_middle(clean(status.workspace), left)
    head: list[Line] = [((name, "bold"), *((("  ", None), (folder, "dim")) if left >= 2 else ()))]
    tail: list[Line] = [(), _bar(status, frame), *_flow(_facts(status), " · ", frame)] if status.rows else []
    for text, style in _remarks(status):
        tail += _wrapped(text, style, frame)
    if not status.rows:
        return [*head, *_wrapped("No configs yet: put YAML files into configs/.", None, frame), *tail]
    # Besides the rows: the headings, and the line of the cursor.
    most = None if frame.height is None else max(2, frame.height - len(head) - len(tail) - 2)
    shown, others = _most_important(status.rows, most)
    if others:
        counts = ", ".join(f"{count:,} {state}" for state, count in Counter(row.state for row in others).items())
        tail = [((cut(f"and {counts}", frame.columns), "dim"),), *tail]
    styles = [{"STATE": _STATES[row.state][1]} for row in shown]
    cells = [_cells(row, frame) for row in shown]
    return [*head, *lay_out_lines(_COLUMNS, cells, frame.width, styles=styles), *tail]


def summary_of(status: SweepStatus) -> str:
    return " · ".join(text for text, _ in _facts(status))


def changes_of(before: SweepStatus, now: SweepStatus) -> list[str]:
    known = {row.config: (row.state, row.attempt) for row in before.rows}
    changes = []
    for row in now.rows:
        if known.get(row.config) != (row.state, row.attempt):
            where = again = ""
            if row.state == "running":
                is_gpu = row.gpu is not None and (row.gpu[:1] in "?0123456789" or ":" in row.gpu)
                where = "" if row.gpu is None else f" on {'GPU ' if is_gpu else ''}{row.gpu}"
                again = f", attempt {row.attempt}" if row.attempt > 1 else ""
            changes.append(clean(f"{row.config} {row.state}{where}{again}"))
    return changes


def _facts(status: SweepStatus) -> list[Span]:
    counts, states = status.counts, Counter(row.state for row in status.rows)
    counted: list[Span] = [(f"{counts['completed']:,} of {counts['total']:,} done", "bold")]
    for count, what, style in (
        (counts["running"], "running", "green"),
        (counts["waiting"], "waiting", None),
        (counts["failed"], "failed", "red"),
        (states["stopped"], "stopped", "yellow"),
        (states[NO_MARKER], "without marker", "yellow"),
        (states["not started"], "not started", "dim"),
    ):
        counted += [(f"{count:,} {what}", style)] if count else []
    if status.is_over:
        return counted
    unknown = "time left unknown" if counts["completed"] else "time left unknown until a task finishes"
    left = unknown if status.left_s is None else f"about {format_duration(status.left_s)} left"
    return [*counted, (left, "dim")]


def _remarks(status: SweepStatus) -> Iterator[Span]:
    counts = status.counts
    if status.is_stopped and counts["completed"] < counts["total"]:
        running = "running tasks finish, and " if counts["running"] else ""
        yield f"Stopped: {running}no new ones start. `start` continues.", "yellow"
    if status.why is not None and counts["waiting"]:
        yield clean(status.why), "yellow" if status.is_paused else "dim"
    failed = [row for row in status.rows if row.state == "failed"]
    for row in failed[:_MOST_NAMED]:
        if row.log is not None:
            yield clean(f"{row.config} failed; log: {row.log}"), "red"
    if unmarked := [row.config for row in status.rows if row.state == NO_MARKER]:
        yield f"completed, but without a marker, so `start` runs again: {_first_names(unmarked)}", "yellow"
    session = next((row.session for row in status.rows if row.state == "running" and row.session), None)
    if session is not None:
        yield f"to watch a task: tmux attach -t {clean(session)}", "dim"
    for text in describe_logs([(row.config, row.log) for row in status.rows if row.log is not None]):
        yield text, "dim"


def describe_logs(logs: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield where the log of each config is: a line for all that differ only in the config's name, the most first."""
    places: dict[str, list[str]] = {}
    for config, log in logs:
        folder, name = os.path.split(log)
        at = name.rfind(config)
        own = f"{folder}/{name[:at]}CONFIG{name[at + len(config) :]}"
        place = own if at >= 0 else f"{folder}; `gpuyard logs JOB` prints one"
        places.setdefault(place, []).append(config)
    for number, (place, configs) in enumerate(sorted(places.items(), key=lambda each: -len(each[1]))):
        yield clean(f"logs: {place}") if not number else clean(f"logs of {_first_names(configs)}: {place}")


def _first_names(configs: Sequence[str]) -> str:
    more = len(configs) - _MOST_NAMED
    return clean(", ".join(configs[:_MOST_NAMED])) + (f" and {more:,} more" if more > 0 else "")


def _bar(status: SweepStatus, frame: Frame) -> Line:
    counts, width = status.counts, min(60, frame.columns - len("  100%"))
    spans, drawn, counted = list[Span](), 0, 0
    for kind, block, style in (("completed", "█", "green"), ("failed", "✗", "red"), ("running", "▒", "green")):
        counted += counts[kind]
        until = max(0, width) * counted // counts["total"]
        spans.append((block * (until - drawn), style))
        drawn = until
    percent = f"{100 * counts['completed'] // counts['total']}%"
    return (*spans, ("░" * (width - drawn), "dim"), ("  ", None), (percent, None))


def _most_important(
    rows: Sequence[ConfigStatus], most: int | None
) -> tuple[Sequence[ConfigStatus], Sequence[ConfigStatus]]:
    """Return the rows that fit, in their order, and the others; one line is left to count those."""
    if most is None or len(rows) <= most:
        return rows, ()
    ranks = {state: rank for rank, state in enumerate(_STATES)}  # rows of the first states are kept
    by_rank = sorted(range(len(rows)), key=lambda at: ranks[rows[at].state])
    return [rows[at] for at in sorted(by_rank[: most - 1])], [rows[at] for at in by_rank[most - 1 :]]


def _cells(row: ConfigStatus, frame: Frame) -> list[str]:
    symbol = f"{_STATES[row.state][0]} " if frame.has_symbols else ""
    written = ESCAPES.sub("", row.last_line or "").strip()
    return [
        cut_middle(clean(row.config), max(16, frame.columns // 3)),
        f"{symbol}{row.state}",
        row.gpu or UNKNOWN,
        format_duration(row.seconds),
        format_size(row.memory_mb),
        str(row.attempt) if row.attempt else UNKNOWN,
        row.session or UNKNOWN,
        " · ".join(clean(text) for text in (row.note, written) if text),
    ]


def _wrapped(text: str, style: str | None, frame: Frame) -> list[Line]:
    """Wrap at spaces; break words that are longer than a line, since a cut path is useless."""
    words = [piece for word in text.split(" ") for piece in _broken(word, frame.columns)]
    return _flow([(word, style) for word in words], " ", frame)


def _broken(word: str, width: int) -> Iterator[str]:
    while cell_width(word) > width:
        piece = cut(word, width, "") or word[0]
        yield piece
        word = word[len(piece) :]
    yield word


def _flow(pieces: Sequence[Span], gap: str, frame: Frame) -> list[Line]:
    lines: list[list[Span]] = []
    left = 0
    for piece, style in pieces:
        needed = cell_width(gap) + cell_width(piece)
        if lines and needed <= left:
            lines[-1] += [(gap, "dim"), (piece, style)]
            left -= needed
        else:
            lines.append([(piece, style)])
            left = frame.columns - cell_width(piece)
    return [tuple(line) for line in lines]
