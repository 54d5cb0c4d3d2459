"""A job of the daemon's answers as text for `queue`, `show` and `top`: state, GPUs, memory, result, progress."""

from gpuyard.core.units import UNKNOWN, format_count, format_duration, format_size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

# Each state with its symbol and its style, in the order in which they are counted.
STATES = {
    "running": ("●", "green"),
    "resuming": ("◍", "green"),
    "pending": ("◔", "green"),
    "stopping": ("◍", "yellow"),
    "suspending": ("◍", "yellow"),
    "suspended": ("◐", "yellow"),
    "queued": ("○", None),
    "delayed": ("◌", "yellow"),
    "blocked": ("◌", "yellow"),
    "held": ("‖", "yellow"),
    "failed": ("✗", "red"),
    "rejected": ("✗", "red"),
    "succeeded": ("✓", "dim"),
    "cancelled": ("-", "dim"),
}
FINISHED = ("failed", "rejected", "succeeded", "cancelled")
UNFINISHED = tuple(state for state in STATES if state not in FINISHED)
# The width of a bar in characters, and its last character by eighths.
_CELLS = 10
_PARTS = " ▏▎▍▌▋▊▉"
_EIGHTHS = 8
_MOST_FIGURES = 2


def job_name(job: "Mapping[str, Any]") -> str:
    """Return `train`, `train[3]` in an array, `train lr=1e-3` in a sweep; or values and command."""
    varying = " ".join(f"{name}={job['values'][name]}" for name in job.get("varies", ()) if name in job["values"])
    if not job["name"]:
        return f"{varying} {job['command']}".strip()
    name = str(job["name"]) if job["index"] is None else f"{job['name']}[{job['index']}]"
    return f"{name} {varying}".strip()


def row_ids(row: "Mapping[str, Any]") -> "int | str":
    """Return the id of a job, or all ids of a sweep or an array, such as "18-57", as a request takes them."""
    ids: int | str = row["group"]["ids"] if row.get("group") else row["id"]
    return ids


def job_cells(job: "Mapping[str, Any]", *, is_unicode: bool, has_symbols: bool = True) -> "dict[str, str]":
    """Return a row of the queue by its headings, as `queue` and `top` show it."""
    symbol = f"{STATES[job['state']][0]} " if is_unicode and has_symbols else ""
    return {
        "ID": str(row_ids(job)),
        "STATE": f"{symbol}{job['state']}",
        "COMMAND": job_name(job),
        "USER": job["user"] or "",
        "TAG": job["tag"] or "",
        "GPU": devices_text(job),
        "VRAM": memory_text(job),
        "PRIO": str(job["priority"]),
        "TIME": format_duration(elapsed_seconds(job)),
        "WHY": running_text(job, is_unicode=is_unicode) or result_text(job),
    }


def state_style(job: "Mapping[str, Any]") -> "dict[str, str | None]":
    return {"STATE": STATES[job["state"]][1]}


def revived_text(answer: "Mapping[str, Any]") -> str:
    """Return what a retry did to jobs that had been skipped because of those that run again; else an empty text."""
    count = answer.get("revived_count", 0)
    if not count:
        return ""
    return f"; {format_count(count, 'skipped job')} {'waits' if count == 1 else 'wait'} again: {answer['revived']}"


def left_alone_text(answer: "Mapping[str, Any]") -> str:
    """Return which finished jobs a retry of what failed did not run again; empty if there are none."""
    left = answer.get("left_alone") or {}
    if not left:
        return ""
    counts = " and ".join(f"{count} {state}" for state, count in sorted(left.items(), reverse=True))
    nothing = "" if answer["count"] or answer["unchanged"] else "no job failed; "
    return f"{nothing}{counts} {'is' if sum(left.values()) == 1 else 'are'} left alone; --all retries them too"


def elapsed_seconds(job: "Mapping[str, Any]") -> float | None:
    seconds: float | None = job["waited_s"] if job["elapsed_s"] is None else job["elapsed_s"]
    return seconds


def devices_text(job: "Mapping[str, Any]") -> str:
    """Return the labels of the GPUs it has or had; before that the number it needs, such as `x2`."""
    if job.get("place"):
        return str(job["place"])
    if job["gpu_labels"]:
        return ",".join(label or "?" for label in job["gpu_labels"])
    return f"x{job['gpus']}" if job["gpus"] else UNKNOWN


def where_text(job: "Mapping[str, Any]") -> str | None:
    """Return `on GPU 0, 1` once it has GPUs of this machine; while it waits `needs 2 GPUs`; None if it needs none."""
    if job["gpu_labels"] and job["waited_s"] is None:
        named = zip(job["devices"], job["gpu_labels"], strict=True)
        names = [device if label is None else label for device, label in named]
        return f"on {'GPU ' if any(job['gpu_labels']) else ''}{', '.join(names)}"
    return f"needs {format_count(job['gpus'], 'GPU')}" if job["gpus"] else None


def gpu_text(device_id: str, answer: "Mapping[str, Any]", prefix: str = "GPU ") -> str:
    """Return `GPU 0`, or the id if the daemon does not know the label (the device is gone, or the daemon is older)."""
    label = answer.get("device_labels", {}).get(device_id)
    return device_id if label is None else f"{prefix}{label}"


def memory_text(job: "Mapping[str, Any]") -> str:
    """Return the memory per GPU: reserved once it has started, estimated while it waits, else as submitted."""
    if not job["gpus"]:
        return UNKNOWN
    if job["attempt"] and job["waited_s"] is None:
        size = job["reserved_mb"]
    else:
        size = job["vram_mb"] if job["estimated_mb"] is None else job["estimated_mb"]
    return "alone" if size is None else format_size(size)


def result_text(job: "Mapping[str, Any]") -> str:
    """Return how the job or attempt ended, or why it has not started; of a sweep or an array, its progress."""
    if job.get("group"):
        return "; ".join(filter(None, (job["group"]["text"], job["reason"])))
    if job["reason"] or job["ended_at"] is None:
        return job["reason"] or ""
    return f"exit status {job['status']}" if job["status"] is not None else job["outcome"] or ""


# Progress and figures


def running_text(job: "Mapping[str, Any]", *, is_unicode: bool, most_figures: int = _MOST_FIGURES) -> str:
    """Return the bar, the amount, the time left and the first figures of a job that has not ended; else an empty
    text."""
    if job["ended_at"] is not None or job["waited_s"] is not None or job["reason"]:
        return ""
    figures = list(job.get("figures", {}).items())[:most_figures]
    words = [progress_text(job, is_unicode=is_unicode), *(f"{name} {_last(each)}" for name, each in figures)]
    return " ".join(filter(None, words))


def progress_text(job: "Mapping[str, Any]", *, is_unicode: bool) -> str:
    """Return `████▌      45% epoch 4.5/10, 3m left`; an empty text if nothing is known."""
    progress = job.get("progress")
    if progress is None:
        return ""
    percent, left_s = progress["percent"], progress["left_s"]
    bar = "" if percent is None else f"{bar_text(percent, is_unicode=is_unicode)} {int(percent):>3}%"
    left = "" if left_s is None or job["ended_at"] is not None else f"{format_duration(left_s)} left"
    return " ".join(filter(None, (bar, ", ".join(filter(None, (amount_text(progress), left))))))


def amount_text(progress: "Mapping[str, Any]") -> str:
    """Return `epoch 4.5/10`, `120/4000`, or an empty text where the percentage says the same."""
    if progress["unit"] == "%":
        return ""
    total = "" if progress["total"] is None else f"/{_number(progress['total'])}"
    return f"{progress['unit']} {_number(progress['done'])}{total}".strip()


def bar_text(percent: float, *, is_unicode: bool) -> str:
    percent = min(100.0, max(0.0, percent))
    if not is_unicode:
        full = int(percent / 100 * _CELLS)
        return "#" * full + "-" * (_CELLS - full)
    full, part = divmod(int(percent / 100 * _CELLS * _EIGHTHS), _EIGHTHS)
    return ("█" * full + (_PARTS[part] if part else "")).ljust(_CELLS, "░")


def figures_text(job: "Mapping[str, Any]") -> str:
    return ", ".join(
        f"{name} {_last(each)}" + ("" if each["least"] is None else f" ({value_text(each['least'])} to "
                                   f"{value_text(each['most'])})")
        for name, each in job.get("figures", {}).items()
    )  # fmt: skip


def value_text(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.4g}"


def _last(figure: "Mapping[str, Any]") -> str:
    return "not a number" if figure["last"] is None else value_text(figure["last"])


def _number(value: float) -> str:
    return f"{value:,.0f}".replace(",", "") if float(value).is_integer() else f"{value:.1f}"
