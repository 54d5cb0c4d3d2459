"""The queue as lines: a heading with counts, and a line per job. All pure."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from rich.text import Text

from gpuyard.core.units import format_duration
from gpuyard.ui.cli.jobs.job_text import STATES, devices_text, elapsed_seconds, job_name, memory_text, result_text
from gpuyard.ui.cli.text_table import cell_width, clean, cut, pad
from gpuyard.ui.tui.glyphs import Glyphs
from gpuyard.ui.tui.row_window import Page, Row, RowWindow

_MARK = 2
_USER_FROM, _TAG_FROM = 110, 130
_RIGHT = frozenset({"ID", "VRAM", "PRIO", "TIME"})
_CHOSEN = "reverse"


class Widths(Struct, frozen=True):
    """Column widths by heading, in display order."""

    of: dict[str, int]


def fit(page: Page, width: int, glyphs: Glyphs) -> Widths:
    """Return fixed widths for short columns, so that nothing moves as times change; names and reasons share the rest.

    Wide terminals show users if there are several, and tags if there are any.
    """
    ids = max((len(str(row["id"])) for row in page.rows), default=0)
    gpus = max((cell_width(clean(devices_text(dict(row)))) for row in page.rows), default=0)
    state = 12 if glyphs.is_unicode else 10
    fixed = {"ID": max(3, ids), "STATE": state, "GPU": min(max(3, gpus), 10), "VRAM": 7, "PRIO": 4, "TIME": 7}
    if width >= _USER_FROM and len({row["user"] for row in page.rows}) > 1:
        fixed["USER"] = 10
    if width >= _TAG_FROM and any(row["tag"] for row in page.rows):
        fixed["TAG"] = 12
    left = width - _MARK - sum(fixed.values()) - len(fixed) - 1
    if left < 20:
        left += fixed.pop("PRIO") + fixed.pop("VRAM") + 2
    longest = max((cell_width(clean(job_name(row))) for row in page.rows), default=0)
    name = max(6, min(max(16, longest), left * 45 // 100))
    order = ("ID", "STATE", "JOB", "USER", "TAG", "GPU", "VRAM", "PRIO", "TIME", "WHY")
    widths = {**fixed, "JOB": name, "WHY": max(1, left - name)}
    return Widths({heading: widths[heading] for heading in order if heading in widths})


def heading_line(widths: Widths) -> Text:
    return Text(" " * _MARK + _join(widths, {heading: heading for heading in widths.of}), "dim")


def job_line(row: Row, widths: Widths, glyphs: Glyphs, *, is_chosen: bool) -> Text:
    cells = {heading: cut(clean(text), widths.of[heading], glyphs.ellipsis) for heading, text in _cells(row, glyphs)
             if heading in widths.of}  # fmt: skip
    line = Text(f"{glyphs.chosen} " if is_chosen else " " * _MARK)
    for place, (heading, width) in enumerate(widths.of.items()):
        style = STATES[row["state"]][1] if heading == "STATE" and not is_chosen else None
        line.append(" " if place else "").append(pad(cells[heading], width, is_right=heading in _RIGHT), style)
    if is_chosen:
        line.stylize(_CHOSEN)
    elif row["state"] in ("succeeded", "cancelled"):
        line.stylize("dim")
    return line


def queue_lines(page: Page, window: RowWindow, width: int, glyphs: Glyphs) -> list[Text]:
    """Return the column headings and the visible rows; a row that is not loaded yet is blank."""
    widths = fit(page, width, glyphs)
    lines = [heading_line(widths)]
    for at in range(window.top, min(window.top + window.height, page.total)):
        row = page.row(at)
        lines.append(Text(f"  {glyphs.ellipsis}", "dim") if row is None
                     else job_line(row, widths, glyphs, is_chosen=at == window.at))  # fmt: skip
    return lines


def counts_text(counts: Mapping[str, int], glyphs: Glyphs) -> Text:
    texts = [Text.assemble((str(counts[state]), "bold"), f" {state}") for state in STATES if counts.get(state)]
    return Text(f" {glyphs.dot} ").join(texts)


def span_text(page: Page, window: RowWindow) -> str:
    """Return `1-20 of 300` if not all rows are visible."""
    last = min(window.top + window.height, page.total)
    return f"{window.top + 1}-{last} of {page.total:,}" if page.total > window.height else ""


def job_title(row: Row) -> str:
    """`17 train[3]`, or its command."""
    return f"{row['id']} {job_name(row)}"


def _cells(row: Row, glyphs: Glyphs) -> list[tuple[str, str]]:
    job: dict[str, Any] = dict(row)
    glyph = f"{STATES[job['state']][0]} " if glyphs.is_unicode else ""
    return [
        ("ID", str(job["id"])),
        ("STATE", f"{glyph}{job['state']}"),
        ("JOB", job_name(row)),
        ("USER", job["user"] or ""),
        ("TAG", job["tag"] or ""),
        ("GPU", devices_text(job)),
        ("VRAM", memory_text(job)),
        ("PRIO", str(job["priority"])),
        ("TIME", format_duration(elapsed_seconds(job))),
        ("WHY", result_text(job)),
    ]


def _join(widths: Widths, cells: Mapping[str, str]) -> str:
    return " ".join(pad(cells[heading], width, is_right=heading in _RIGHT) for heading, width in widths.of.items())
