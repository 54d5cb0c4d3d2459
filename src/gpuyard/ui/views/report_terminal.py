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

_PIPE_WIDTH = 80


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
    for group in groups:
        name, *figures = texts.group_cells(group)
        rows.append([cut(name, 40), *figures, _bar(group["gpu_hours"], most)])
    figures = ["GPU-HOURS", "ENERGY", "IDLE", "JOBS", "RUNS", "WAIT", "WASTE", "FAILED"]
    columns = make_columns(by, *figures, "", right=figures, long=(by,), spare=("RUNS", "", "IDLE", "ENERGY"))
    styles: list[dict[str, str | None]] = [
        {"FAILED": "red" if texts.failed_count(group) else "dim"} for group in groups
    ]
    return _table(columns, rows, styles, 20, frame)


def _causes(report: Answer, frame: Frame) -> list[Line]:
    columns = make_columns("DID NOT SUCCEED", "ATTEMPTS", "", right=("ATTEMPTS",), long=("DID NOT SUCCEED",))
    rows = [texts.cause_cells(cause) for cause in report["total"]["causes"]]
    return _table(columns, rows, [{"": "green"}] * len(rows), 10, frame)


def _devices(report: Answer, frame: Frame) -> list[Line]:
    right, name = ("", "HOURS", "ATTEMPTS"), "BUSIEST GPUs"
    columns = make_columns(name, "IN USE", "", "HOURS", "ATTEMPTS", right=right, long=(name,))
    rows = []
    for device in report["devices"]:
        name, *figures = texts.device_cells(device)
        rows.append([cut(name, 28), _bar(device["busy_percent"] or 0.0, 100.0), *figures])
    return _table(columns, rows, [{"IN USE": "green"}] * len(rows), 16, frame)


def _table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    styles: list[dict[str, str | None]],
    most: int,
    frame: Frame,
) -> list[Line]:
    """Return the first rows, and how many more there are; no lines without a row."""
    if not rows:
        return []
    table = lay_out_lines(columns, rows[:most], frame.width, styles=styles[:most])
    return [*table, ((f"and {len(rows) - most:,} more", "dim"),)] if len(rows) > most else table


def _bar(value: float, most: float) -> str:
    length = round(12 * value / most) if most else 0
    return "█" * (length or int(value > 0))


def _chart(report: Answer, frame: Frame) -> list[Line]:
    """Return a line per day with a character per hour, blank if unknown; a narrow terminal gets no sums."""
    if not report["box"]["devices"]:
        return []
    has_sums, picture = (frame.width or _PIPE_WIDTH) >= 78, report["picture"]
    none, levels = "·", "▁▂▃▄▅▆▇█"
    hours = "".join(f"{hour:<6}" for hour in range(0, 24, 3))
    lines: list[Line] = [
        ((texts.picture_text(report).upper().replace("GPUS", "GPUs"), "dim"),),
        ((f"{'':12}{hours}{' GPU-hours' if has_sums else ''}".rstrip(), "dim"),),
    ]
    for row in picture["rows"]:
        line: list[Span] = [(f"{texts.day_text(row, picture['days_per_row']):12}", "dim")]
        for percent in row["used_percent"]:
            level = levels[min(len(levels) - 1, int((percent or 0.0) / 100 * len(levels)))]
            line.append((f"{level} ", "green") if percent else ("  " if percent is None else f"{none} ", "dim"))
        line += [(f" {texts.hours_text(sum(row['gpu_hours'])):>9}", None)] if has_sums else []
        lines.append(tuple(line))
    return [*lines, ((f"{'':12}{none} none  {levels[0]} few  {levels[-1]} all", "dim"),)]


def summary_lines(summary: Answer, frame: Frame) -> Iterator[Line]:
    since, until = (datetime.fromisoformat(summary[key]).astimezone() for key in ("since", "until"))
    where = f"{clean(summary['host'])}, since " if summary["host"] else "Since "
    took = format_duration((until - since).total_seconds())
    yield ((f"{where}{since:%a} {since.day} {since:%b %H:%M} ({took})", "bold"),)
    yield ((_counts(summary), None),)
    if summary["causes"]:
        yield ()
        yield from _failures(summary["causes"], frame)
        yield ()
        retry, logs = summary["failed_ids"].replace(" ", ","), summary["causes"][0]["first"]
        yield ((f"gpuyard retry {retry}", "cyan"), ("  runs them again", "dim"))
        yield ((f"gpuyard logs {logs}", "cyan"), ("  shows the output of the first", "dim"))
    yield from (((f"warning: {clean(each)}", "yellow"),) for each in summary["unbrought"])
    yield ()
    hours, energy = summary["gpu_hours"], summary["energy"]
    figures = [f"{hours:,.1f} GPU-hours" if hours >= 0.05 or not hours else f"{hours * 60:.1f} GPU-minutes"]
    if energy["kwh"] is not None:
        figures.append(format_energy(energy["kwh"] * 3_600_000))
    if energy["cost"] is not None:
        figures.append(format_money(energy["cost"], clean(energy["currency"])))
    if energy["co2e_kg"] is not None:
        figures.append(format_co2e(energy["co2e_kg"] * 1000))
    yield ((f"Used: {', '.join(figures)}", None),)


def _counts(summary: Answer) -> str:
    ended = {state: summary[state] for state in ("succeeded", "failed", "rejected", "cancelled")}
    now = {"running now": summary["now"]["running"]}
    now |= {state: summary["now"][state] for state in ("waiting", "held", "suspended")}
    facts = [f"{count:,} {word}" for word, count in {**ended, **now}.items() if count]
    return " · ".join(facts) or "No job has ended since then, and none runs or waits."


def _failures(causes: Sequence[Answer], frame: Frame) -> Iterator[Line]:
    most = 15
    columns = make_columns("", "FAILED", "JOBS", right=("",), long=("FAILED", "JOBS"))
    rows = [(f"{each['count']:,} x", each["text"] or "other causes", each["ids"]) for each in causes[:most]]
    styles: list[dict[str, str | None]] = [{"": "red", "JOBS": "dim"}] * len(rows)
    yield from lay_out_lines(columns, rows, frame.width, styles=styles)
    if left := causes[most:]:
        yield ((f"and {sum(each['count'] for each in left):,} jobs for {len(left):,} more causes (--json)", "dim"),)
