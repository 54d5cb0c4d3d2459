"""The progress and the figures of a job as text, for `queue`, `show` and `top`."""

from gpuyard.core.units import UNKNOWN, format_duration

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_CELLS = 10
_PARTS = " ▏▎▍▌▋▊▉"
_EIGHTHS = 8
_MOST_FIGURES = 2


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
    """Return a bar of 10 characters."""
    percent = min(100.0, max(0.0, percent))
    if not is_unicode:
        full = int(percent / 100 * _CELLS)
        return "#" * full + "-" * (_CELLS - full)
    full, part = divmod(int(percent / 100 * _CELLS * _EIGHTHS), _EIGHTHS)
    return ("█" * full + (_PARTS[part] if part else "")).ljust(_CELLS, "░")


def figures_text(job: "Mapping[str, Any]") -> str:
    """Return all figures with their last value and their range."""
    return ", ".join(
        f"{name} {_last(each)}" + ("" if each["least"] is None else f" ({value_text(each['least'])} to "
                                   f"{value_text(each['most'])})")
        for name, each in job.get("figures", {}).items()
    )  # fmt: skip


def value_text(value: float | None) -> str:
    """Return a figure with four digits that count."""
    return UNKNOWN if value is None else f"{value:.4g}"


def _last(figure: "Mapping[str, Any]") -> str:
    return "not a number" if figure["last"] is None else value_text(figure["last"])


def _number(value: float) -> str:
    return f"{value:,.0f}".replace(",", "") if float(value).is_integer() else f"{value:.1f}"
