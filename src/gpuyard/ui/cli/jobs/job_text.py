"""A job of the daemon's answers as text: state, GPUs, memory and result, for `queue`, `show` and `top`."""

from gpuyard.core.units import UNKNOWN, format_count, format_size

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


def job_name(job: "Mapping[str, Any]") -> str:
    """Return `train`, `train[3]` in an array, `train lr=1e-3` in a sweep; or values and command."""
    varying = " ".join(f"{name}={job['values'][name]}" for name in job.get("varies", ()) if name in job["values"])
    if not job["name"]:
        return f"{varying} {job['command']}".strip()
    name = str(job["name"]) if job["index"] is None else f"{job['name']}[{job['index']}]"
    return f"{name} {varying}".strip()


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
    """Return how long it has run, or waited."""
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
    key = "estimated_mb" if job["waited_s"] is not None else "reserved_mb" if job["attempt"] else "vram_mb"
    return "alone" if job[key] is None else format_size(job[key])


def result_text(job: "Mapping[str, Any]") -> str:
    """Return how the job or attempt ended, or why it has not started; of a sweep or an array, its progress."""
    if job.get("group"):
        return "; ".join(filter(None, (job["group"]["text"], job["reason"])))
    if job["reason"] or job["ended_at"] is None:
        return job["reason"] or ""
    return f"exit status {job['status']}" if job["status"] is not None else job["outcome"] or ""
