"""Reports and the summary of a night as lines for a terminal. All pure. Names are data: control characters in them
are replaced. Without Unicode, ASCII stands for the blocks. Unknown is a dash, never a zero.
"""

import textwrap
from collections.abc import Iterator, Sequence
from datetime import datetime

from gpuyard.model.units import format_co2e, format_duration, format_energy, format_money
from gpuyard.ui.cli.text_table import GAP, Column, Line, Span, clean, cut, lay_out_lines, make_columns
from gpuyard.ui.views import Frame
from gpuyard.ui.views import report_sentences as texts
from gpuyard.ui.views.report_sentences import Answer

_BAR, _NARROW, _PIPE_WIDTH = 12, 78, 80
_LONGEST_NAME, _LONGEST_DEVICE = 40, 28
_MOST_GROUPS, _MOST_CAUSES, _MOST_DEVICES = 20, 10, 16
_GROUPS = ("GPU-HOURS", "ENERGY", "IDLE", "JOBS", "RUNS", "WAIT", "WASTE", "FAILED")
_CAUSES = make_columns("DID NOT SUCCEED", "ATTEMPTS", "", right=("ATTEMPTS",), long=("DID NOT SUCCEED",))
_DEVICES = make_columns(
    "BUSIEST GPUs", "IN USE", "", "HOURS", "ATTEMPTS", right=("", "HOURS", "ATTEMPTS"), long=("BUSIEST GPUs",)
)


def report_lines(report: Answer, frame: Frame) -> list[Line]:
    lines: list[Line] = [((texts.title(report), "bold"),)]
    if not report["total"]["attempts"]:
        return [*lines, ((texts.NOTHING_RAN, None),)]
    lines += [(), *_facts(report, frame.width or _PIPE_WIDTH)]
    lines += [(), *_groups(report, frame)]
    for part in (_causes(report, frame), _chart(report, frame), _devices(report, frame)):
        lines += [(), *part] if part else []
    return lines


def _facts(report: Answer, width: int) -> Iterator[Line]:
    facts = list(texts.facts(report))
    headings, figures = (max(len(fact[at]) for fact in facts) for at in (0, 1))
    margin = headings + figures + 2 * len(GAP)
    for heading, figure, explanation in facts:
        first, *others = textwrap.wrap(explanation, max(20, width - margin)) or [""]
        yield ((heading.ljust(headings), "dim"), (GAP, None), (figure.rjust(figures), "bold"), (f"{GAP}{first}", None))
        for line in others:
            yield ((" " * margin + line, None),)


def _groups(report: Answer, frame: Frame) -> list[Line]:
    groups, by = report["groups"], report["by"].upper()
    most = max(group["gpu_hours"] for group in groups)
    rows = []
    for group in groups[:_MOST_GROUPS]:
        name, *figures = texts.group_cells(group)
        rows.append([cut(name, _LONGEST_NAME, frame.ellipsis), *figures, _bar(group["gpu_hours"], most, frame)])
    columns = make_columns(by, *_GROUPS, "", right=_GROUPS, long=(by,), spare=("RUNS", "", "IDLE", "ENERGY"))
    styles = ["red" if texts.failed_count(group) else "dim" for group in groups]
    return [*_table(columns, rows, frame, "FAILED", styles), *_more(len(groups) - _MOST_GROUPS)]


def _causes(report: Answer, frame: Frame) -> list[Line]:
    causes = report["total"]["causes"]
    rows = [texts.cause_cells(cause) for cause in causes[:_MOST_CAUSES]]
    if not rows:
        return []
    return [*_table(_CAUSES, rows, frame, "", ["green"] * len(rows)), *_more(len(causes) - _MOST_CAUSES)]


def _devices(report: Answer, frame: Frame) -> list[Line]:
    devices = report["devices"]
    rows = []
    for device in devices[:_MOST_DEVICES]:
        name, *figures = texts.device_cells(device)
        bar = _bar(device["busy_percent"] or 0.0, 100.0, frame)
        rows.append([cut(name, _LONGEST_DEVICE, frame.ellipsis), bar, *figures])
    if not rows:
        return []
    table = _table(_DEVICES, rows, frame, "IN USE", ["green"] * len(rows))
    return [*table, *_more(len(devices) - _MOST_DEVICES)]


def _table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], frame: Frame, coloured: str, styles: Sequence[str]
) -> list[Line]:
    by_row: list[dict[str, str | None]] = [{coloured: style} for style in styles]
    return lay_out_lines(columns, rows, frame.width, frame.ellipsis, styles=by_row)


def _more(count: int) -> list[Line]:
    return [((f"and {count:,} more", "dim"),)] if count > 0 else []


def _bar(value: float, most: float, frame: Frame) -> str:
    length = round(_BAR * value / most) if most else 0
    return ("█" if frame.is_unicode else "#") * (length or int(value > 0))


def _chart(report: Answer, frame: Frame) -> list[Line]:
    """Return a line per day with a character per hour; a narrow terminal gets no sums."""
    if not report["box"]["devices"]:
        return []
    has_sums, picture = (frame.width or _PIPE_WIDTH) >= _NARROW, report["picture"]
    none, levels = ("·", "▁▂▃▄▅▆▇█") if frame.is_unicode else (".", ":-=+*%#@")
    hours = "".join(f"{hour:<6}" for hour in range(0, 24, 3))
    return [
        ((texts.picture_text(report).upper().replace("GPUS", "GPUs"), "dim"),),
        ((f"{'':12}{hours}{' GPU-hours' if has_sums else ''}".rstrip(), "dim"),),
        *(_chart_row(row, picture["days_per_row"], none, levels, has_sum=has_sums) for row in picture["rows"]),
        ((f"{'':12}{none} none  {levels[0]} few  {levels[-1]} all", "dim"),),
    ]


def _chart_row(row: Answer, days: int, none: str, levels: str, *, has_sum: bool) -> Line:
    """Unknown hours are blank; `levels` go from little to much."""
    line: list[Span] = [(f"{texts.day_text(row, days):12}", "dim")]
    for percent in row["used_percent"]:
        level = levels[min(len(levels) - 1, int((percent or 0.0) / 100 * len(levels)))]
        line.append((f"{level} ", "green") if percent else ("  " if percent is None else f"{none} ", "dim"))
    line += [(f" {texts.hours_text(sum(row['gpu_hours'])):>9}", None)] if has_sum else []
    return tuple(line)


_MOST_FAILURES = 15
_FAILURES = (Column("", is_right=True), Column("FAILED", is_long=True), Column("JOBS", is_long=True))
_OTHER_CAUSES = "other causes"


def summary_lines(summary: Answer, frame: Frame) -> Iterator[Line]:
    yield ((_summary_title(summary), "bold"),)
    yield ((_counts(summary, frame), None),)
    if summary["causes"]:
        yield ()
        yield from _failures(summary, frame)
        yield ()
        first = summary["causes"][0]["first"]
        for command, purpose in (
            (retry_command(summary["failed_ids"]), "runs them again"),
            (f"gpuyard logs {first}", "shows the output of the first"),
        ):
            yield ((command, "cyan"), (f"  {purpose}", "dim"))
    yield from (((f"warning: {clean(each)}", "yellow"),) for each in summary["unbrought"])
    yield ()
    yield ((cost_text(summary), None),)


def retry_command(ids: str) -> str:
    return f"gpuyard retry {ids.replace(' ', ',')}"


def cost_text(summary: Answer) -> str:
    """Return the GPU-hours, with their energy and money as far as they are known."""
    hours, energy = summary["gpu_hours"], summary["energy"]
    figures = [f"{hours:,.1f} GPU-hours" if hours >= 0.05 or not hours else f"{hours * 60:.1f} GPU-minutes"]
    if energy["kwh"] is not None:
        figures.append(format_energy(energy["kwh"] * 3_600_000))
    if energy["cost"] is not None:
        figures.append(format_money(energy["cost"], clean(energy["currency"])))
    if energy["co2e_kg"] is not None:
        figures.append(format_co2e(energy["co2e_kg"] * 1000))
    return f"Used: {', '.join(figures)}"


def _summary_title(summary: Answer) -> str:
    since, until = (datetime.fromisoformat(summary[key]).astimezone() for key in ("since", "until"))
    where = f"{clean(summary['host'])}, since " if summary["host"] else "Since "
    took = format_duration((until - since).total_seconds())
    return f"{where}{since:%a} {since.day} {since:%b %H:%M} ({took})"


def _counts(summary: Answer, frame: Frame) -> str:
    now = summary["now"]
    counted = {
        "succeeded": summary["succeeded"],
        "failed": summary["failed"],
        "rejected": summary["rejected"],
        "cancelled": summary["cancelled"],
        "running now": now["running"],
        "waiting": now["waiting"],
        "held": now["held"],
        "suspended": now["suspended"],
    }
    facts = [f"{count:,} {word}" for word, count in counted.items() if count]
    return (" · " if frame.is_unicode else ", ").join(facts) or "No job has ended since then, and none runs or waits."


def _failures(summary: Answer, frame: Frame) -> Iterator[Line]:
    causes = summary["causes"]
    rows = [(f"{each['count']:,} x", each["text"] or _OTHER_CAUSES, each["ids"]) for each in causes[:_MOST_FAILURES]]
    styles: list[dict[str, str | None]] = [{"": "red", "JOBS": "dim"}] * len(rows)
    yield from lay_out_lines(_FAILURES, rows, frame.width, frame.ellipsis, styles=styles)
    left = causes[_MOST_FAILURES:]
    if left:
        yield ((f"and {sum(each['count'] for each in left):,} jobs for {len(left):,} more causes (--json)", "dim"),)
