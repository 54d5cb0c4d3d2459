"""What `gpuyard show` tells about each attempt: what it was given and used, its memory over time, what it lacked."""

from gpuyard.ui.cli.jobs.memory_chart import draw
from gpuyard.ui.cli.text_table import clean, duration_text, size_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

_ROWS = 3
_MARGIN = 2
_WIDTH_IN_A_PIPE = 80
# More points than this are not kept.
_WIDEST = 120


def memory_lines(job: "dict[str, Any]", width: int | None, *, is_unicode: bool) -> "Iterator[str]":
    """Of each attempt that was given or used anything."""
    for attempt in job["attempts"]:
        figures = _figures(attempt)
        if not figures and attempt["lack"] is None:
            continue
        yield ""
        yield f"attempt {attempt['number']}: {', '.join(figures)}"
        for line in _picture(attempt, width or _WIDTH_IN_A_PIPE, is_unicode=is_unicode):
            yield f"{' ' * _MARGIN}{line}".rstrip()
        if attempt["lack"] is not None:
            is_last = attempt is job["attempts"][-1]
            yield from _lack_lines(attempt["lack"], job if is_last else None)


def _figures(attempt: "dict[str, Any]") -> list[str]:
    reserved, predicted, peaks = attempt["reserved_mb"], attempt["predicted_mb"], attempt["peaks_mb"]
    told = []
    if attempt["devices"]:
        told.append("alone" if reserved is None else f"reserved {size_text(reserved)}")
    if predicted is not None:
        told.append(f"predicted {size_text(predicted)}")
    for device, peak in sorted(peaks.items()):
        told.append(f"peak {size_text(peak)}{f' on {device}' if len(peaks) > 1 else ''}")
    if attempt["ram_mb"] is not None:
        told.append(f"RAM {size_text(attempt['ram_mb'])}")
    if attempt["load_percent"] is not None:
        told.append(f"load {attempt['load_percent']:.0f}%")
    if attempt["suspended_s"]:
        told.append(f"suspended for {duration_text(attempt['suspended_s'])}")
    return told


def _picture(attempt: "dict[str, Any]", room: int, *, is_unicode: bool) -> list[str]:
    """The curve between its axes; nothing where there is no time or no memory to show."""
    points = attempt["curve"]
    if len(points) < 2 or not any(used for _, used in points):
        return []
    labels = [size_text(max(used for _, used in points)), *[""] * (_ROWS - 1)]
    label_width = max(map(len, labels))
    upright, corner, flat = ("│", "└", "─") if is_unicode else ("|", "+", "-")
    width = min(_WIDEST, room - label_width - _MARGIN - 2)
    if width < 10:
        return []
    rows = draw(points, attempt["ran_s"], width, _ROWS, is_unicode=is_unicode)
    lines = [f"{label:>{label_width}} {upright}{row}" for label, row in zip(labels, rows, strict=True)]
    end = duration_text(max(attempt["ran_s"], points[-1][0]))
    lines.append(f"{'0':>{label_width}} {corner}{flat * width}")
    lines.append(f"{'':>{label_width}}  0s{end:>{width - 2}}")
    return lines


def _lack_lines(lack: "dict[str, Any]", job: "dict[str, Any] | None") -> "Iterator[str]":
    """What it needed and had, and who had the rest; for the last attempt, what comes next."""
    what = "out of memory" if lack["where"] == "device" else "out of RAM"
    needed = f"needed {size_text(lack['needed_mb'])}" if lack["needed_mb"] is not None else "needed more"
    had = lack["had_mb"] if lack["had_mb"] is not None else lack["held_mb"]
    yield f"  {what}: {needed}" + (f", had {size_text(had)}" if had is not None else "")
    for line in _explained(lack, job):
        yield f"    {clean(line)}"


def _explained(lack: "dict[str, Any]", job: "dict[str, Any] | None") -> list[str]:
    own = [("held_mb", "held {}"), ("asked_mb", "asked for {} more")]
    there = [("free_mb", "{} free"), ("total_mb", "{} in all")]
    others = [f"{one['who']}{_so_much(one['memory_mb'])}" for one in lack["others"]]
    told = [
        ("it", _sizes(lack, own)),
        ("GPU" if lack["where"] == "device" else "RAM", _sizes(lack, there)),
        ("held by others", "; ".join(others)),
        ("it said", lack["says"]),
        ("next", None if job is None else _following(job)),
    ]
    return [f"{name}: {text}" for name, text in told if text]


def _sizes(lack: "dict[str, Any]", wanted: list[tuple[str, str]]) -> str:
    return ", ".join(text.format(size_text(lack[key])) for key, text in wanted if lack[key] is not None)


def _so_much(megabytes: float | None) -> str:
    return "" if megabytes is None else f" {size_text(megabytes)}"


def _following(job: "dict[str, Any]") -> str | None:
    """What a job is given that is to run again."""
    growth = job["growth"]
    if growth is None or job["ended_at"] is not None:
        return None
    if growth["alone"]:
        return "again, alone on the largest GPU"
    if growth["memory_mb"] is not None:
        return f"again, with {size_text(growth['memory_mb'])}"
    return "again" if growth["ram_mb"] is None else f"again, when {size_text(growth['ram_mb'])} of RAM are available"
