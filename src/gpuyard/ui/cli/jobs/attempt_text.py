"""The attempts part of `gpuyard show`: memory reserved and used, its chart, and for out-of-memory what was missing."""

from gpuyard.core.units import format_duration, format_size
from gpuyard.ui.cli.jobs.memory_chart import draw
from gpuyard.ui.cli.text_table import clean

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

_ROWS = 3
_MARGIN = 2
_WIDTH_IN_A_PIPE = 80
# The daemon keeps at most this many points of a curve.
_WIDEST = 120


def memory_lines(job: "dict[str, Any]", width: int | None, *, is_unicode: bool) -> "Iterator[str]":
    """Yield the lines of each attempt that reserved or used memory."""
    for attempt in job["attempts"]:
        figures = _figures(attempt)
        if not figures and attempt["lack"] is None:
            continue
        yield ""
        yield f"attempt {attempt['number']}: {', '.join(figures)}"
        for line in _chart(attempt, width or _WIDTH_IN_A_PIPE, is_unicode=is_unicode):
            yield f"{' ' * _MARGIN}{line}".rstrip()
        if attempt["lack"] is not None:
            is_last = attempt is job["attempts"][-1]
            yield from _lack_lines(attempt["lack"], job if is_last else None)


def _figures(attempt: "dict[str, Any]") -> list[str]:
    reserved, predicted, peaks = attempt["reserved_mb"], attempt["predicted_mb"], attempt["peaks_mb"]
    figures = []
    if attempt["devices"]:
        figures.append("alone" if reserved is None else f"reserved {format_size(reserved)}")
    if predicted is not None:
        figures.append(f"predicted {format_size(predicted)}")
    for device, peak in sorted(peaks.items()):
        figures.append(f"peak {format_size(peak)}{f' on {device}' if len(peaks) > 1 else ''}")
    if attempt["ram_mb"] is not None:
        figures.append(f"RAM {format_size(attempt['ram_mb'])}")
    if attempt["load_percent"] is not None:
        figures.append(f"load {attempt['load_percent']:.0f}%")
    if attempt["suspended_s"]:
        figures.append(f"suspended for {format_duration(attempt['suspended_s'])}")
    return figures


def _chart(attempt: "dict[str, Any]", width: int, *, is_unicode: bool) -> list[str]:
    """Return the curve with its axes; no lines if it has fewer than two points or no memory was used."""
    points = attempt["curve"]
    if len(points) < 2 or not any(used for _, used in points):
        return []
    labels = [format_size(max(used for _, used in points)), *[""] * (_ROWS - 1)]
    label_width = max(map(len, labels))
    upright, corner, flat = ("│", "└", "─") if is_unicode else ("|", "+", "-")
    columns = min(_WIDEST, width - label_width - _MARGIN - 2)
    if columns < 10:
        return []
    rows = draw(points, attempt["ran_s"], columns, _ROWS, is_unicode=is_unicode)
    lines = [f"{label:>{label_width}} {upright}{row}" for label, row in zip(labels, rows, strict=True)]
    end = format_duration(max(attempt["ran_s"], points[-1][0]))
    lines.append(f"{'0':>{label_width}} {corner}{flat * columns}")
    lines.append(f"{'':>{label_width}}  0s{end:>{columns - 2}}")
    return lines


def _lack_lines(lack: "dict[str, Any]", job: "dict[str, Any] | None") -> "Iterator[str]":
    """Yield how much memory was needed and available, who held the rest, and for the last attempt what happens next."""
    what = "out of memory" if lack["where"] == "device" else "out of RAM"
    needed = f"needed {format_size(lack['needed_mb'])}" if lack["needed_mb"] is not None else "needed more"
    had = lack["had_mb"] if lack["had_mb"] is not None else lack["held_mb"]
    yield f"  {what}: {needed}" + (f", had {format_size(had)}" if had is not None else "")
    for line in _lack_details(lack, job):
        yield f"    {clean(line)}"


def _lack_details(lack: "dict[str, Any]", job: "dict[str, Any] | None") -> list[str]:
    own = [("held_mb", "held {}"), ("asked_mb", "requested {} more")]
    device = [("free_mb", "{} free"), ("total_mb", "{} in total")]
    others = [
        other["who"] + ("" if other["memory_mb"] is None else f" {format_size(other['memory_mb'])}")
        for other in lack["others"]
    ]
    details = [
        ("this job", _sizes(lack, own)),
        ("GPU" if lack["where"] == "device" else "RAM", _sizes(lack, device)),
        ("held by others", "; ".join(others)),
        ("error message", lack["says"]),
        ("next", None if job is None else _next_step(job)),
    ]
    return [f"{name}: {text}" for name, text in details if text]


def _sizes(lack: "dict[str, Any]", texts: list[tuple[str, str]]) -> str:
    return ", ".join(text.format(format_size(lack[key])) for key, text in texts if lack[key] is not None)


def _next_step(job: "dict[str, Any]") -> str | None:
    """Return what the retry of an unfinished job gets, or None if there is no retry."""
    growth = job["growth"]
    if growth is None or job["ended_at"] is not None:
        return None
    if growth["alone"]:
        return "retry alone on the largest GPU"
    if growth["memory_mb"] is not None:
        return f"retry with {format_size(growth['memory_mb'])}"
    return "retry" if growth["ram_mb"] is None else f"retry when {format_size(growth['ram_mb'])} of RAM are available"
