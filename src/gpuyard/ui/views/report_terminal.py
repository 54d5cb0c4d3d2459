"""A report as lines for a terminal: its figures, a bar per group, causes of failures, a chart of hours, the GPUs.

All pure. Names are data: control characters in them are replaced. Without Unicode, ASCII stands for the blocks.
"""

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from gpuyard.ui.cli.text_table import GAP, Column, Line, Span, cut, join_spans, lay_out
from gpuyard.ui.views import report_sentences as texts
from gpuyard.ui.views.device_tables import Frame

_BAR, _NARROW, _PIPE_WIDTH = 12, 78, 80
_LONGEST_NAME, _LONGEST_DEVICE = 40, 28
_MOST_GROUPS, _MOST_CAUSES, _MOST_DEVICES = 20, 10, 16
_GROUPS = (
    Column("GPU-HOURS", is_right=True),
    Column("JOBS", is_right=True),
    Column("RUNS", is_right=True, is_spare=True),
    Column("WAIT", is_right=True),
    Column("WASTE", is_right=True),
    Column("FAILED", is_right=True),
    Column("", is_spare=True),
)
_CAUSES = (Column("DID NOT SUCCEED", is_long=True), Column("ATTEMPTS", is_right=True), Column(""))
_DEVICES = (
    Column("BUSIEST GPUs", is_long=True),
    Column("IN USE"),
    Column("", is_right=True),
    Column("HOURS", is_right=True),
    Column("ATTEMPTS", is_right=True),
)


class Marks(Struct, frozen=True, kw_only=True):
    """The characters of bars and of the chart; `levels` go from little to much."""

    bar: str
    levels: str
    none: str


_BLOCKS = Marks(bar="█", levels="▁▂▃▄▅▆▇█", none="·")
_LETTERS = Marks(bar="#", levels=":-=+*%#@", none=".")


def _marks(frame: Frame) -> Marks:
    return _BLOCKS if frame.is_unicode else _LETTERS


def report_lines(report: dict[str, Any], frame: Frame) -> list[Line]:
    lines: list[Line] = [((texts.title(report), "bold"),)]
    if texts.is_empty(report):
        return [*lines, ((texts.NOTHING_RAN, None),)]
    lines += [(), *_facts(report, frame.width or _PIPE_WIDTH)]
    lines += [(), *_groups(report, frame)]
    for part in (_causes(report, frame), _chart(report, frame), _devices(report, frame)):
        lines += [(), *part] if part else []
    return lines


def _facts(report: dict[str, Any], width: int) -> Iterator[Line]:
    """Yield each figure with its explanation, which may take several lines."""
    facts = list(texts.facts(report))
    headings, figures = (max(len(fact[at]) for fact in facts) for at in (0, 1))
    margin = headings + figures + 2 * len(GAP)
    for heading, figure, explanation in facts:
        first, *others = textwrap.wrap(explanation, max(20, width - margin)) or [""]
        yield ((heading.ljust(headings), "dim"), (GAP, None), (figure.rjust(figures), "bold"), (f"{GAP}{first}", None))
        for line in others:
            yield ((" " * margin + line, None),)


def _groups(report: dict[str, Any], frame: Frame) -> list[Line]:
    groups = report["groups"]
    most = max(group["gpu_hours"] for group in groups)
    rows = [
        [
            cut(texts.group_text(group), _LONGEST_NAME, frame.ellipsis),
            texts.hours_text(group["gpu_hours"]),
            f"{group['jobs']:,}",
            f"{group['attempts']:,}",
            texts.median_wait(group),
            texts.percent_text(group["memory"]["unused_percent"]),
            f"{texts.failed_count(group):,}",
            _bar(group["gpu_hours"], most, frame),
        ]
        for group in groups[:_MOST_GROUPS]
    ]
    columns = (Column(report["by"].upper(), is_long=True), *_GROUPS)
    styles = ["red" if texts.failed_count(group) else "dim" for group in groups]
    return [*_table(columns, rows, frame, "FAILED", styles), *_more(len(groups) - _MOST_GROUPS)]


def _causes(report: dict[str, Any], frame: Frame) -> list[Line]:
    causes = report["total"]["causes"]
    rows = [
        [texts.cause_text(cause), f"{cause['attempts']:,}", texts.healed_text(cause)] for cause in causes[:_MOST_CAUSES]
    ]
    if not rows:
        return []
    return [*_table(_CAUSES, rows, frame, "", ["green"] * len(rows)), *_more(len(causes) - _MOST_CAUSES)]


def _devices(report: dict[str, Any], frame: Frame) -> list[Line]:
    devices = report["devices"]
    rows = [
        [
            cut(texts.device_text(device), _LONGEST_DEVICE, frame.ellipsis),
            _bar(device["busy_percent"] or 0.0, 100.0, frame),
            texts.percent_text(device["busy_percent"]),
            texts.hours_text(device["busy_hours"]),
            f"{device['attempts']:,}",
        ]
        for device in devices[:_MOST_DEVICES]
    ]
    if not rows:
        return []
    return [
        *_table(_DEVICES, rows, frame, "IN USE", ["green"] * len(rows)),
        *_more(len(devices) - _MOST_DEVICES),
    ]


def _table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], frame: Frame, coloured: str, styles: Sequence[str]
) -> Iterator[Line]:
    """Yield the table; the cells under the heading `coloured` have the style of their row."""
    headings, *lines = lay_out(columns, rows, frame.width, frame.ellipsis)
    yield join_spans((cell, "dim") for cell in headings)
    for cells, style in zip(lines, styles, strict=False):
        named = zip(headings, cells, strict=True)
        yield join_spans((cell, style if heading.strip() == coloured else None) for heading, cell in named)


def _more(count: int) -> list[Line]:
    return [((f"and {count:,} more", "dim"),)] if count > 0 else []


def _bar(value: float, most: float, frame: Frame) -> str:
    length = round(_BAR * value / most) if most else 0
    return _marks(frame).bar * (length or int(value > 0))


def _chart(report: dict[str, Any], frame: Frame) -> list[Line]:
    """Return a line per day with a character per hour; a narrow terminal gets no sums."""
    if not report["box"]["devices"]:
        return []
    has_sums, picture, marks = (frame.width or _PIPE_WIDTH) >= _NARROW, report["picture"], _marks(frame)
    hours = "".join(f"{hour:<6}" for hour in range(0, 24, 3))
    return [
        ((texts.picture_text(report).upper().replace("GPUS", "GPUs"), "dim"),),
        ((f"{'':12}{hours}{' GPU-hours' if has_sums else ''}".rstrip(), "dim"),),
        *(_chart_row(row, picture["days_per_row"], marks, has_sum=has_sums) for row in picture["rows"]),
        ((f"{'':12}{marks.none} none  {marks.levels[0]} few  {marks.levels[-1]} all", "dim"),),
    ]


def _chart_row(row: dict[str, Any], days: int, marks: Marks, *, has_sum: bool) -> Line:
    line: list[Span] = [(f"{texts.day_text(row, days):12}", "dim")]
    line += [(f"{_level(percent, marks)} ", "green" if percent else "dim") for percent in row["used_percent"]]
    line += [(f" {texts.hours_text(sum(row['gpu_hours'])):>9}", None)] if has_sum else []
    return tuple(line)


def _level(percent: float | None, marks: Marks) -> str:
    if not percent:
        return " " if percent is None else marks.none
    return marks.levels[min(len(marks.levels) - 1, int(percent / 100 * len(marks.levels)))]
