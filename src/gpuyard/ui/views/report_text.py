"""Reports, and the summary of a night: their texts, for the terminal and for HTML, and their lines for a terminal. All
pure, from the daemon's answer. Names are data: control characters in them are replaced. Unknown is a dash, not a zero.
"""

import signal
import textwrap
from collections.abc import Iterator, Sequence
from datetime import date, datetime
from typing import Any

from gpuyard.model.units import UNKNOWN, format_count, format_duration, format_energy
from gpuyard.ui.cli.jobs.job_text import cost_texts
from gpuyard.ui.cli.text_table import GAP, Column, Line, Span, clean, cut, lay_out_lines, make_columns
from gpuyard.ui.views import Frame

Answer = dict[str, Any]
NOTHING_RAN = "No job ran in this time. Submit one: gpuyard submit -- python train.py"
_CAUSES = {
    "cannot-start": "could not be started",
    "timed-out": "over its time limit",
    "cancelled": "cancelled",
    "lost": "lost: its node failed",
    "preempted": "preempted by a more urgent job",
    "memory-guard": "stopped before its GPU ran out of memory",
    "device-fault": "ended by a fault of its GPU",
    "host-guard": "stopped before the machine ran out of RAM",
    "not-restored": "could not be resumed after a suspension",
}
# Attempts that gpuyard stopped to let others run: they run again, and did not fail.
_STOPPED = ("preempted", "memory-guard", "host-guard")


def title(report: Answer) -> str:
    since, until = (datetime.fromisoformat(report[key]).astimezone() for key in ("since", "until"))
    where = f"{clean(report['host'])}, " if report["host"] else ""
    return f"{where}{since:%a} {since.day} {since:%b %Y %H:%M} to {until:%a} {until.day} {until:%b %Y %H:%M}"


def hours_text(hours: float) -> str:
    if hours < 0.005:
        return "<0.01" if hours > 0 else "0"
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.1f}" if hours >= 1 else f"{hours:.2f}"


def percent_text(percent: float | None) -> str:
    if percent is None:
        return UNKNOWN
    return "<1%" if 0 < percent < 0.5 else f"{percent:.0f}%"


def failed_count(figures: Answer) -> int:
    """Return the attempts that failed by themselves: neither cancelled by a user nor stopped to let others run."""
    return sum(each["attempts"] for each in figures["causes"] if each["outcome"] not in ("cancelled", *_STOPPED))


def facts(report: Answer) -> Iterator[tuple[str, str, str]]:
    """Yield the heading of each figure, the figure, and a sentence that explains it."""
    total, box, waits = report["total"], report["box"], report["total"]["waits"]
    used = f"{percent_text(box['busy_percent'])} of the time of {format_count(box['devices'], 'GPU')} was in use"
    yield "GPU-hours", hours_text(total["gpu_hours"]), used if box["devices"] else "this machine has no GPU now"

    def ended(*outcomes: str) -> int:
        return sum(cause["attempts"] for cause in total["causes"] if cause["outcome"] in outcomes)

    rest = (
        (ended("cancelled"), "cancelled"),
        (ended(*_STOPPED), "stopped to let others run"),
        (total["running"], "still running"),
    )
    how = ["", *(f"{count:,} {what}" for count, what in rest if count)]
    ended_text = f"{total['succeeded']:,} succeeded, {failed_count(total):,} failed{', '.join(how)}"
    yield "Jobs", f"{total['jobs']:,}", f"{format_count(total['attempts'], 'attempt')}: {ended_text}"
    spread = (
        f"median; 9 of 10 jobs started within {format_duration(waits['p90_s'])}, "
        f"the slowest after {format_duration(waits['longest_s'])}"
    )
    started = spread if waits["jobs"] else "no job started for the first time"
    yield "Wait", format_duration(waits["median_s"]), started
    yield "Waste", percent_text(total["memory"]["unused_percent"]), _waste(total["memory"])
    yield "Energy", _kwh(total["energy"]), _energy(total["energy"])
    if short := [cause for cause in total["causes"] if cause["outcome"] == "out-of-memory"]:
        attempts, healed = sum(cause["attempts"] for cause in short), sum(cause["healed"] for cause in short)
        some = f"{'all' if healed == attempts else f'{healed:,}'} of those jobs succeeded later"
        yield "Out of memory", f"{attempts:,}", some if healed else "none of those jobs has succeeded since"
    if total["suspended_hours"]:
        yield "Suspended", f"{hours_text(total['suspended_hours'])} h", "of jobs that were suspended for others"


def _waste(memory: Answer) -> str:
    unknown = memory["unknown_gpu_hours"]
    left = f"not measured for {hours_text(unknown)} GPU-hours" if unknown else ""
    if memory["unused_percent"] is None:
        return left or "no GPU memory was reserved"
    reserved, unused = hours_text(memory["reserved_gb_hours"]), hours_text(memory["unused_gb_hours"])
    text = f"of the memory reserved was never used: {unused} of {reserved} GB-hours"
    return f"{text}; {left}" if left else text


def _kwh(energy: Answer) -> str:
    return UNKNOWN if energy["kwh"] is None else format_energy(energy["kwh"] * 3_600_000)


def _energy(energy: Answer) -> str:
    """Return what the energy cost, and how many GPU-hours worked and were idle."""
    if energy["kwh"] is None:
        return "no energy was measured: the GPUs report neither energy nor power, or no job ran on one"
    worked, idle = hours_text(energy["worked_gpu_hours"]), hours_text(energy["idle_gpu_hours"])
    hours = f"the GPUs worked for {worked} GPU-hours, and were held idle for {idle}"
    unknown = f"not measured for {hours_text(energy['unknown_gpu_hours'])}" if energy["unknown_gpu_hours"] else None
    return "; ".join(filter(None, [", ".join(_costs(energy)), hours, unknown]))


def _costs(energy: Answer) -> list[str]:
    return cost_texts(energy, None if energy["co2e_kg"] is None else energy["co2e_kg"] * 1000)


def _cause_text(cause: Answer) -> str:
    outcome, status = cause["outcome"], cause["status"]
    if outcome == "out-of-memory":
        return {"device": "out of GPU memory", "host": "out of RAM"}.get(cause["where"], "out of memory")
    if outcome != "failed":
        return _CAUSES.get(outcome) or str(outcome)
    if status is None:
        return "failed"
    error = cause.get("error_line")
    try:
        name = signal.Signals(status - 128).name
    except ValueError:
        return f"exit status {status}" if error is None else f"{clean(error)} (exit status {status})"
    return f"exit status {status} ({name})" if error is None else f"{clean(error)} ({name})"


# The cells of the tables; the first one is a name


def group_cells(group: Answer) -> list[str]:
    return [
        f"({group['groups']:,} others)" if group["group"] is None else clean(group["group"]),
        hours_text(group["gpu_hours"]),
        _kwh(group["energy"]),
        hours_text(group["energy"]["idle_gpu_hours"]),
        f"{group['jobs']:,}",
        f"{group['attempts']:,}",
        format_duration(group["waits"]["median_s"]),
        percent_text(group["memory"]["unused_percent"]),
        f"{failed_count(group):,}",
    ]


def cause_cells(cause: Answer) -> list[str]:
    healed = f"{cause['healed']:,} succeeded on a later attempt" if cause["healed"] else ""
    return [_cause_text(cause), f"{cause['attempts']:,}", healed]


def device_cells(device: Answer) -> list[str]:
    name = f"GPU {device['label'] or UNKNOWN}" + (f", {clean(device['name'])}" if device["name"] is not None else "")
    return [
        name if device["is_there"] else f"{clean(device['id'])} (gone)",
        percent_text(device["busy_percent"]),
        hours_text(device["busy_hours"]),
        f"{device['attempts']:,}",
    ]


def day_text(row: Answer, days_per_row: int) -> str:
    """Return the first day of a row; rows of more than a week can go back years, so they have the year."""
    day = date.fromisoformat(row["day"])
    return f"{day:%a} {day.day:2} {day:%b}" if days_per_row <= 7 else f"{day.day:2} {day:%b %Y}"


def picture_text(report: Answer) -> str:
    days = report["picture"]["days_per_row"]
    each = "" if days == 1 else f", {days} days to a row" if days == 7 else f", {days // 7} weeks to a row"
    return f"GPUs in use by the hour{each}"


_PIPE_WIDTH = 80


def report_lines(report: Answer, frame: Frame) -> list[Line]:
    lines: list[Line] = [((title(report), "bold"),)]
    if not report["total"]["attempts"]:
        return [*lines, ((NOTHING_RAN, None),)]
    lines += [(), *_facts(report, frame.width or _PIPE_WIDTH)]
    lines += [(), *_groups(report, frame)]
    for part in (_causes(report, frame), _chart(report, frame), _devices(report, frame)):
        lines += [(), *part] if part else []
    return lines


def _facts(report: Answer, width: int) -> Iterator[Line]:
    told = list(facts(report))
    headings, figures = (max(len(fact[at]) for fact in told) for at in (0, 1))
    margin = headings + figures + 2 * len(GAP)
    for heading, figure, explanation in told:
        first, *others = textwrap.wrap(explanation, max(20, width - margin)) or [""]
        yield ((heading.ljust(headings), "dim"), (GAP, None), (figure.rjust(figures), "bold"), (f"{GAP}{first}", None))
        for line in others:
            yield ((" " * margin + line, None),)


def _groups(report: Answer, frame: Frame) -> list[Line]:
    groups, by = report["groups"], report["by"].upper()
    most = max(group["gpu_hours"] for group in groups)
    rows = []
    for group in groups:
        name, *figures = group_cells(group)
        rows.append([cut(name, 40), *figures, _bar(group["gpu_hours"], most)])
    figures = ["GPU-HOURS", "ENERGY", "IDLE", "JOBS", "RUNS", "WAIT", "WASTE", "FAILED"]
    columns = make_columns(by, *figures, "", right=figures, long=(by,), spare=("RUNS", "", "IDLE", "ENERGY"))
    styles: list[dict[str, str | None]] = [{"FAILED": "red" if failed_count(group) else "dim"} for group in groups]
    return _table(columns, rows, styles, 20, frame)


def _causes(report: Answer, frame: Frame) -> list[Line]:
    columns = make_columns("DID NOT SUCCEED", "ATTEMPTS", "", right=("ATTEMPTS",), long=("DID NOT SUCCEED",))
    rows = [cause_cells(cause) for cause in report["total"]["causes"]]
    return _table(columns, rows, [{"": "green"}] * len(rows), 10, frame)


def _devices(report: Answer, frame: Frame) -> list[Line]:
    right, name = ("", "HOURS", "ATTEMPTS"), "BUSIEST GPUs"
    columns = make_columns(name, "IN USE", "", "HOURS", "ATTEMPTS", right=right, long=(name,))
    rows = []
    for device in report["devices"]:
        name, *figures = device_cells(device)
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
        ((picture_text(report).upper().replace("GPUS", "GPUs"), "dim"),),
        ((f"{'':12}{hours}{' GPU-hours' if has_sums else ''}".rstrip(), "dim"),),
    ]
    for row in picture["rows"]:
        line: list[Span] = [(f"{day_text(row, picture['days_per_row']):12}", "dim")]
        for percent in row["used_percent"]:
            level = levels[min(len(levels) - 1, int((percent or 0.0) / 100 * len(levels)))]
            line.append((f"{level} ", "green") if percent else ("  " if percent is None else f"{none} ", "dim"))
        line += [(f" {hours_text(sum(row['gpu_hours'])):>9}", None)] if has_sums else []
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
    figures += [*([] if energy["kwh"] is None else [_kwh(energy)]), *_costs(energy)]
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
