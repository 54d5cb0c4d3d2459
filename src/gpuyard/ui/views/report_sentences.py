"""The texts of a report, for the terminal and for HTML: figures as sentences, names of causes and devices.

All pure, from the daemon's answer. Unknown is a dash, never a zero.
"""

import signal
from collections.abc import Iterator
from datetime import date, datetime
from typing import Any

from gpuyard.model.units import UNKNOWN, format_co2e, format_count, format_duration, format_energy, format_money
from gpuyard.ui.cli.text_table import clean

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
    cost = None if energy["cost"] is None else format_money(energy["cost"], clean(energy["currency"]))
    co2e = None if energy["co2e_kg"] is None else format_co2e(energy["co2e_kg"] * 1000)
    worked, idle = hours_text(energy["worked_gpu_hours"]), hours_text(energy["idle_gpu_hours"])
    hours = f"the GPUs worked for {worked} GPU-hours, and were held idle for {idle}"
    unknown = f"not measured for {hours_text(energy['unknown_gpu_hours'])}" if energy["unknown_gpu_hours"] else None
    return "; ".join(filter(None, [", ".join(filter(None, [cost, co2e])), hours, unknown]))


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
