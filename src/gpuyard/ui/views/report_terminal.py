"""A report on a terminal: its figures, a bar for each group, how attempts failed, the hours of the week, the GPUs.

Names are data: nothing in them is obeyed. Where the terminal cannot show blocks, letters stand for them.
"""

from collections.abc import Iterator
from typing import Any

from msgspec import Struct
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpuyard.ui.cli.text_table import cut
from gpuyard.ui.views import report_sentences as texts

_BAR, _NARROW = 12, 78
_RUNS = "RUNS"
_HEADINGS = ("GPU-HOURS", "JOBS", _RUNS, "WAIT", "WASTE", "FAILED")
# What the figures of a group take, with bars and without.
_FIGURES_ROOM, _FEW_FIGURES_ROOM = 65, 43
_SHORTEST, _LONGEST, _LONGEST_DEVICE = 8, 40, 28
_MOST_GROUPS, _MOST_CAUSES, _MOST_DEVICES = 20, 10, 16


class Marks(Struct, frozen=True, kw_only=True):
    """What bars and hours are drawn with; `levels` from little to much."""

    bar: str
    levels: str
    none: str
    ellipsis: str


BLOCKS = Marks(bar="█", levels="▁▂▃▄▅▆▇█", none="·", ellipsis="…")
LETTERS = Marks(bar="#", levels=":-=+*%#@", none=".", ellipsis="~")


def report_view(report: dict[str, Any], columns: int, *, is_unicode: bool) -> RenderableType:
    marks = BLOCKS if is_unicode else LETTERS
    head = Text(texts.title(report), style="bold")
    if texts.is_empty(report):
        return Group(head, Text(texts.NOTHING_RAN))
    parts = [
        _facts(report),
        _groups(report, columns, marks),
        *_causes(report),
        *_picture(report, columns, marks),
        *_devices(report, marks),
    ]
    return Group(head, *(each for part in parts for each in (Text(), part)))


def _facts(report: dict[str, Any]) -> Table:
    table = _grid()
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", style="bold", no_wrap=True)
    table.add_column()
    for heading, figure, told in texts.facts(report):
        table.add_row(heading, figure, Text(told))
    return table


def _groups(report: dict[str, Any], columns: int, marks: Marks) -> Table:
    """In a narrow terminal names are cut and figures are not; bars go, and how often jobs were run."""
    is_wide = columns >= _NARROW
    table = _grid(has_heading=True)
    room = columns - (_FIGURES_ROOM if is_wide else _FEW_FIGURES_ROOM)
    room = max(_SHORTEST, min(_LONGEST, room))
    table.add_column(report["by"].upper(), no_wrap=True)
    cells = [_cells(group) for group in report["groups"][:_MOST_GROUPS]]
    most = max(group["gpu_hours"] for group in report["groups"])
    headings = [heading for heading in _HEADINGS if is_wide or heading != _RUNS]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for group, told in zip(report["groups"], cells, strict=False):
        bar = [_bar(group["gpu_hours"], most, marks)] if is_wide else []
        table.add_row(_name(texts.group_text(group), room, marks), *(told[heading] for heading in headings), *bar)
    _add_more(table, len(report["groups"]) - _MOST_GROUPS)
    return table


def _name(text: str, room: int, marks: Marks) -> Text:
    return Text(cut(text, room, marks.ellipsis))


def _cells(group: dict[str, Any]) -> dict[str, str | Text]:
    figures = (
        texts.hours_text(group["gpu_hours"]),
        f"{group['jobs']:,}",
        f"{group['attempts']:,}",
        texts.median_wait(group),
        texts.percent_text(group["memory"]["unused_percent"]),
        _failed(group),
    )
    return dict(zip(_HEADINGS, figures, strict=True))


def _failed(group: dict[str, Any]) -> Text:
    failed = texts.failed_count(group)
    return Text(f"{failed:,}", style="red" if failed else "dim")


def _bar(value: float, most: float, marks: Marks) -> Text:
    length = round(_BAR * value / most) if most else 0
    return Text(marks.bar * (length or int(value > 0)), style="green")


def _causes(report: dict[str, Any]) -> Iterator[Table]:
    causes = report["total"]["causes"]
    if not causes:
        return
    table = _grid(has_heading=True)
    table.add_column("ENDED OTHERWISE", no_wrap=True)
    table.add_column("ATTEMPTS", justify="right", no_wrap=True)
    table.add_column()
    for cause in causes[:_MOST_CAUSES]:
        table.add_row(Text(texts.cause_text(cause)), f"{cause['attempts']:,}", Text(texts.healed_text(cause), "green"))
    _add_more(table, len(causes) - _MOST_CAUSES)
    yield table


def _picture(report: dict[str, Any], columns: int, marks: Marks) -> Iterator[RenderableType]:
    """In a narrow terminal it goes without its sums."""
    if not report["box"]["devices"]:
        return
    rows, days = report["picture"]["rows"], report["picture"]["days_per_row"]
    hours = "".join(f"{hour:<6}" for hour in range(0, 24, 3))
    yield Group(
        Text(texts.picture_text(report).upper().replace("GPUS", "GPUs"), style="dim"),
        Text(f"{'':12}{hours}{' GPU-hours' if columns >= _NARROW else ''}".rstrip(), style="dim"),
        *(_row(row, days, marks, has_sum=columns >= _NARROW) for row in rows),
        Text(f"{'':12}{marks.none} none  {marks.levels[0]} few  {marks.levels[-1]} all", style="dim"),
    )


def _row(row: dict[str, Any], days: int, marks: Marks, *, has_sum: bool) -> Text:
    line = Text().append(f"{texts.day_text(row, days):12}", style="dim")
    for percent in row["used_percent"]:
        line.append(f"{_cell(percent, marks)} ", style="dim" if not percent else "green")
    return line.append(f" {texts.hours_text(sum(row['gpu_hours'])):>9}") if has_sum else line


def _cell(percent: float | None, marks: Marks) -> str:
    if not percent:
        return " " if percent is None else marks.none
    return marks.levels[min(len(marks.levels) - 1, int(percent / 100 * len(marks.levels)))]


def _devices(report: dict[str, Any], marks: Marks) -> Iterator[Table]:
    devices = report["devices"]
    if not devices:
        return
    table = _grid(has_heading=True)
    table.add_column("BUSIEST GPUs", no_wrap=True)
    table.add_column("IN USE", no_wrap=True)
    for heading in ("", "HOURS", "ATTEMPTS"):
        table.add_column(heading, justify="right", no_wrap=True)
    for device in devices[:_MOST_DEVICES]:
        table.add_row(
            _name(texts.device_text(device), _LONGEST_DEVICE, marks),
            _bar(device["busy_percent"] or 0.0, 100.0, marks),
            texts.percent_text(device["busy_percent"]),
            texts.hours_text(device["busy_hours"]),
            f"{device['attempts']:,}",
        )
    _add_more(table, len(devices) - _MOST_DEVICES)
    yield table


def _grid(*, has_heading: bool = False) -> Table:
    return Table(box=None, show_header=has_heading, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))


def _add_more(table: Table, count: int) -> None:
    if count > 0:
        table.add_row(Text(f"and {count:,} more", style="dim"))
