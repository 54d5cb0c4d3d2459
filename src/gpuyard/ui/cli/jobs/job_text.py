"""A job of the daemon's answers as text for `queue`, `show` and `top`: state, GPUs, memory, result, progress; and
the page of jobs that `queue` prints, the runs of a sweep or an array, and what would be submitted.
"""

import sys

from gpuyard.model.units import UNKNOWN, format_co2e, format_count, format_duration, format_money, format_size
from gpuyard.ui.cli.command_grammar import Answer, Typed
from gpuyard.ui.cli.terminal import is_terminal, note, paint, say, say_json, table_lines
from gpuyard.ui.cli.text_table import Column, clean, make_columns

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


def row_ids(row: "Mapping[str, Any]") -> "int | str":
    """Return the id of a job, or all ids of a sweep or an array, such as "18-57", as a request takes them."""
    ids: int | str = row["group"]["ids"] if row.get("group") else row["id"]
    return ids


def job_cells(job: "Mapping[str, Any]", *, has_symbols: bool = True) -> "dict[str, str]":
    """Return a row of the queue by its headings, as `queue` and `top` show it."""
    symbol = f"{STATES[job['state']][0]} " if has_symbols else ""
    return {
        "ID": str(row_ids(job)),
        "STATE": f"{symbol}{job['state']}",
        "COMMAND": job_name(job),
        "USER": job["user"] or "",
        "TAG": job["tag"] or "",
        "GPU": devices_text(job),
        "VRAM": memory_text(job),
        "PRIO": str(job["priority"]),
        "TIME": format_duration(job["waited_s"] if job["elapsed_s"] is None else job["elapsed_s"]),
        "WHY": running_text(job) or result_text(job),
    }


def revived_text(answer: "Mapping[str, Any]") -> str:
    """Return what a retry did to jobs that had been skipped because of those that run again; else an empty text."""
    count = answer.get("revived_count", 0)
    if not count:
        return ""
    return f"; {format_count(count, 'skipped job')} {'waits' if count == 1 else 'wait'} again: {answer['revived']}"


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


def running_text(job: "Mapping[str, Any]", *, most_figures: int = 2) -> str:
    """Return the bar, the amount, the time left and the first figures of a job that has not ended; else an empty
    text."""
    if job["ended_at"] is not None or job["waited_s"] is not None or job["reason"]:
        return ""
    figures = list(job.get("figures", {}).items())[:most_figures]
    words = [progress_text(job), *(f"{name} {_last(each)}" for name, each in figures)]
    return " ".join(filter(None, words))


def progress_text(job: "Mapping[str, Any]") -> str:
    """Return `████▌      45% epoch 4.5/10, 3m left`; an empty text if nothing is known."""
    progress = job.get("progress")
    if progress is None:
        return ""
    percent, left_s = progress["percent"], progress["left_s"]
    bar = "" if percent is None else f"{_bar_text(percent)} {int(percent):>3}%"
    amount = ""  # where the percentage says the same
    if progress["unit"] != "%":  # `epoch 4.5/10`, `120/4000`
        total = "" if progress["total"] is None else f"/{_number(progress['total'])}"
        amount = f"{progress['unit']} {_number(progress['done'])}{total}".strip()
    left = "" if left_s is None or job["ended_at"] is not None else f"{format_duration(left_s)} left"
    return " ".join(filter(None, (bar, ", ".join(filter(None, (amount, left))))))


def _bar_text(percent: float) -> str:
    """Return a bar of 10 characters; the last one by eighths."""
    tenths = min(100.0, max(0.0, percent)) / 10
    full, part = divmod(int(tenths * 8), 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[part] if part else "")).ljust(10, "░")


def figures_text(job: "Mapping[str, Any]") -> str:
    return ", ".join(
        f"{name} {_last(each)}" + ("" if each["least"] is None else f" ({value_text(each['least'])} to "
                                   f"{value_text(each['most'])})")
        for name, each in job.get("figures", {}).items()
    )  # fmt: skip


def cost_texts(energy: "Mapping[str, Any]", co2e_g: float | None) -> list[str]:
    """Return what energy cost, and how much CO2e it caused, as far as that is known."""
    money = None if energy["cost"] is None else format_money(energy["cost"], clean(energy["currency"]))
    return list(filter(None, [money, None if co2e_g is None else format_co2e(co2e_g)]))


def value_text(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.4g}"


def _last(figure: "Mapping[str, Any]") -> str:
    return "not a number" if figure["last"] is None else value_text(figure["last"])


def _number(value: float) -> str:
    return f"{value:,.0f}".replace(",", "") if float(value).is_integer() else f"{value:.1f}"


_COLUMNS = make_columns(
    "ID", "STATE", "COMMAND", "GPU", "VRAM", "PRIO", "TIME", "WHY",
    right=("ID", "VRAM", "PRIO", "TIME"), long=("COMMAND", "WHY"), spare=("VRAM", "PRIO"),
)  # fmt: skip


def say_page(answer: Answer, query: "dict[str, str] | None" = None) -> None:
    dot = " · "
    facts = [f"{answer['counts'][state]} {state}" for state in STATES if answer["counts"].get(state)]
    if not facts:
        facts = ["The queue is empty. Submit a job: gpuyard submit -- python train.py"]
    elif not answer["jobs"]:
        facts.append("no jobs match")
    say(paint(dot.join(facts), "bold"))
    if answer["paused"]:
        say(paint("Paused: no new jobs start. `gpuyard unpause` starts them again.", "yellow"))
    if answer["draining"]:
        say(paint("Draining: running jobs finish, no new ones start. `gpuyard unpause` ends it.", "yellow"))
    say(*(paint(f"! {clean(notice)}", "yellow") for notice in answer.get("notices", ())))
    if jobs := answer["jobs"]:
        rows = [job_cells(job, has_symbols=is_terminal(sys.stdout)) for job in jobs]
        cells = [[row[column.heading] for column in _COLUMNS] for row in rows]
        say(*table_lines(_COLUMNS, cells, [{"STATE": STATES[job["state"]][1]} for job in jobs]))
    if is_terminal(sys.stdout) and any(job.get("group") for job in answer["jobs"]):
        say(paint("`gpuyard queue --sweep ID` shows the runs of a sweep or an array", "dim"))
    if answer["next"] is not None:
        say(paint(_more_text(answer, query or {"ids": "", "state": "", "all": ""}), "dim"))


def _more_text(answer: Answer, query: dict[str, str]) -> str:
    """Say how many matching jobs are not shown; with IDS that is not known. Lines of a folded queue are counted."""
    if any(job.get("group") for job in answer["jobs"]):
        more = answer["total"] - len(answer["jobs"])
        return f"and {more} more lines: `gpuyard queue --limit {10 * len(answer['jobs'])}` shows more"
    states = query["state"].split(",") if query["state"] else [*STATES] if query["all"] else UNFINISHED
    total = sum(answer["counts"].get(state, 0) for state in states)
    more = 0 if query["ids"] else total - sum(job["state"] in states for job in answer["jobs"])
    count = f"{more} more" if more > 0 else "more"
    return f"and {count}: `gpuyard queue --limit {10 * len(answer['jobs'])}` shows more"


def say_preview(typed: Typed, answer: Answer) -> None:
    for line in answer["notes"]:
        note(f"gpuyard: {line}")
    if typed.flag("json"):
        say_json(answer)
        return
    say(paint(f"This would submit {format_count(answer['count'], 'job')}; nothing was submitted.", "bold"))
    shown, names = answer["jobs"][:50], answer["varies"]
    rows = [[*(job["values"][name] for name in names), job["command"]] for job in shown]
    say(*table_lines([*map(Column, names), Column("COMMAND", is_long=True)], rows))
    if more := answer["count"] - len(shown):
        say(paint(f"and {more:,} more: --json lists the first 1,000", "dim"))


def sweep_lines(answer: Answer, *, has_symbols: bool) -> list[str]:
    progress = answer["progress"]
    title = " ".join(filter(None, (progress["ids"], answer["name"], answer["tag"] and f"({answer['tag']})")))
    columns = [
        Column("ID", is_right=True),
        *(Column(each["title"], is_right=each["kind"] != "text") for each in answer["columns"]),
        Column("GPU"),
        Column("WHY", is_long=True),
    ]
    state = next(each["title"] for each in answer["columns"] if each["name"] == "state")
    rows = []
    for job in answer["jobs"]:
        cells = [_cell_text(cell, column) for cell, column in zip(job["cells"], answer["columns"], strict=True)]
        if has_symbols:
            at = next(at for at, column in enumerate(answer["columns"]) if column["name"] == "state")
            cells[at] = f"{STATES[job['state']][0]} {cells[at]}"
        why = running_text(job, most_figures=0) or result_text(job)
        rows.append([str(job["id"]), *cells, devices_text(job), why])
    styles = [{state: STATES[job["state"]][1]} for job in answer["jobs"]]
    return [
        paint(clean(f"{title}: {progress['text']}"), "bold"),
        paint(clean(answer["command"]), "dim"),
        *table_lines(columns, rows, styles),
    ]


def _cell_text(cell: "str | float | None", column: Answer) -> str:
    if cell is None or isinstance(cell, str):
        return UNKNOWN if cell is None else cell
    return {"seconds": format_duration, "figure": value_text}.get(column["kind"], "{:g}".format)(cell)
