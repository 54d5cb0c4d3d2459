"""The texts of a report, for the terminal and for HTML: figures as sentences, names of causes and devices.

All pure, from the daemon's answer. Unknown is a dash, never a zero.
"""

import signal
from collections.abc import Iterator
from datetime import date, datetime
from typing import Any

from gpuyard.core.units import UNKNOWN, format_count, format_duration
from gpuyard.ui.cli.text_table import clean

NOTHING_RAN = "No job ran in this time. Submit one: gpuyard submit -- python train.py"
_CAUSES = {
    "cannot-start": "could not be started",
    "timed-out": "exceeded its time limit",
    "cancelled": "cancelled",
    "lost": "lost: its node failed",
    "preempted": "preempted by a more urgent job",
    "not-restored": "could not be resumed after a suspension",
}
_SHORT_OF = {"device": "out of GPU memory", "host": "out of RAM"}


def is_empty(report: dict[str, Any]) -> bool:
    return not report["total"]["attempts"]


def title(report: dict[str, Any]) -> str:
    """Return host, start and end, in this machine's time zone."""
    since, until = (datetime.fromisoformat(report[key]).astimezone() for key in ("since", "until"))
    where = f"{clean(report['host'])}, " if report["host"] else ""
    return f"{where}{_moment(since)} to {_moment(until)}"


def _moment(at: datetime) -> str:
    return f"{at:%a} {at.day} {at:%b %Y %H:%M}"


def hours_text(hours: float) -> str:
    if hours < 0.005:
        return "<0.01" if hours > 0 else "0"
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.1f}" if hours >= 1 else f"{hours:.2f}"


def percent_text(percent: float | None) -> str:
    if percent is None:
        return UNKNOWN
    return "<1%" if 0 < percent < 0.5 else f"{percent:.0f}%"


def failed_count(figures: dict[str, Any]) -> int:
    return sum(cause["attempts"] for cause in figures["causes"])


def facts(report: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield heading, figure and explanation."""
    total, box = report["total"], report["box"]
    used = f"{percent_text(box['busy_percent'])} of the time of {format_count(box['devices'], 'GPU')} was in use"
    yield "GPU-hours", hours_text(total["gpu_hours"]), used if box["devices"] else "this machine has no GPU now"
    yield "Jobs", f"{total['jobs']:,}", _attempts(total)
    yield "Wait", format_duration(total["waits"]["median_s"]), _waits(total["waits"])
    yield "Waste", percent_text(total["memory"]["unused_percent"]), _waste(total["memory"])
    if short := [cause for cause in total["causes"] if cause["outcome"] == "out-of-memory"]:
        healed = sum(cause["healed"] for cause in short)
        some = (
            "all of those jobs succeeded later"
            if healed == _sum(short)
            else f"{healed:,} of those jobs succeeded later"
        )
        yield "Out of memory", f"{_sum(short):,}", some if healed else "none of those jobs has succeeded since"
    if total["suspended_hours"]:
        yield "Suspended", f"{hours_text(total['suspended_hours'])} h", "of jobs that were suspended for others"


def _sum(causes: list[dict[str, Any]]) -> int:
    return sum(cause["attempts"] for cause in causes)


def _attempts(total: dict[str, Any]) -> str:
    ended = f"{total['succeeded']:,} succeeded, {failed_count(total):,} did not"
    running = f", {total['running']:,} still running" if total["running"] else ""
    return f"{total['attempts']:,} attempt{'' if total['attempts'] == 1 else 's'}: {ended}{running}"


def _waits(waits: dict[str, Any]) -> str:
    if not waits["jobs"]:
        return "no job started for the first time"
    return (
        f"median; 9 of 10 jobs started within {format_duration(waits['p90_s'])}, "
        f"the slowest after {format_duration(waits['longest_s'])}"
    )


def _waste(memory: dict[str, Any]) -> str:
    unknown = memory["unknown_gpu_hours"]
    left = f"not measured for {hours_text(unknown)} GPU-hours" if unknown else ""
    if memory["unused_percent"] is None:
        return left or "no GPU memory was reserved"
    reserved, unused = hours_text(memory["reserved_gb_hours"]), hours_text(memory["unused_gb_hours"])
    text = f"of the memory reserved was never used: {unused} of {reserved} GB-hours"
    return f"{text}; {left}" if left else text


def cause_text(cause: dict[str, Any]) -> str:
    outcome, status = cause["outcome"], cause["status"]
    if outcome == "out-of-memory":
        return _SHORT_OF.get(cause["where"], "out of memory")
    if outcome != "failed":
        return _CAUSES.get(outcome) or str(outcome)
    if status is None:
        return "failed"
    return f"exit status {status}{_signal_text(status)}"


def _signal_text(status: int) -> str:
    try:
        return f" ({signal.Signals(status - 128).name})"
    except ValueError:
        return ""


def healed_text(cause: dict[str, Any]) -> str:
    return f"{cause['healed']:,} succeeded on a later attempt" if cause["healed"] else ""


def group_text(group: dict[str, Any]) -> str:
    return f"({group['groups']:,} others)" if group["group"] is None else clean(group["group"])


def device_text(device: dict[str, Any]) -> str:
    if not device["is_there"]:
        return f"{clean(device['id'])} (gone)"
    number = f"GPU {UNKNOWN if device['index'] is None else device['index']}"
    return number if device["name"] is None else f"{number}, {clean(device['name'])}"


def day_text(row: dict[str, Any], days_per_row: int) -> str:
    """Return the first day of a row; rows of more than a week can go back years, so they have the year."""
    day = date.fromisoformat(row["day"])
    return f"{day:%a} {day.day:2} {day:%b}" if days_per_row <= 7 else f"{day.day:2} {day:%b %Y}"


def picture_text(report: dict[str, Any]) -> str:
    """Return the title of the chart, with the time that a row covers."""
    days = report["picture"]["days_per_row"]
    each = "" if days == 1 else f", {days} days to a row" if days == 7 else f", {days // 7} weeks to a row"
    return f"GPUs in use by the hour{each}"


def median_wait(figures: dict[str, Any]) -> str:
    return format_duration(figures["waits"]["median_s"])
