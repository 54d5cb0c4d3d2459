"""A summary of a night as lines: how many jobs succeeded and failed, the causes with their jobs, and what it cost.

All pure, from the daemon's answer. Unknown is a dash, never a zero.
"""

from collections.abc import Iterator
from datetime import datetime

from gpuyard.core.units import format_co2e, format_duration, format_energy, format_money
from gpuyard.ui.cli.text_table import Column, Line, clean, lay_out_lines
from gpuyard.ui.views import Frame
from gpuyard.ui.views.report_sentences import Answer

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
