"""`gpuyard queue`: what runs, what waits and why, and what has finished."""

import sys

from gpuyard.connect.fast_http import connect
from gpuyard.errors import UserError
from gpuyard.ui.cli.terminal import ellipsis, is_terminal, is_unicode, paint, room, say, say_json
from gpuyard.ui.cli.text_table import Column, devices_text, duration_text, lay_out, line_of, memory_text, result_text
from gpuyard.ui.cli.verb_options import JSON, Arguments, Option, Typed, Verb

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VERB = Verb(
    """Show what runs, what waits and why, and what has finished.

    First what runs, then what waits in the order in which it would start, then what finished last. IDS are such as 17,
    17-20, name=big, tag=night.
    """,
    (
        Option("all", None, "All that ever finished, too."),
        Option("state", "STATES", "Only these, such as failed,cancelled."),
        Option("limit", "N", "At most so many. [what fits the terminal; 50 in a pipe]"),
        JSON,
    ),
    Arguments("[IDS]...", is_many=True),
)
COLUMNS = (
    Column("ID", is_right=True),
    Column("STATE"),
    Column("COMMAND", is_long=True),
    Column("GPU"),
    Column("VRAM", is_right=True, is_spare=True),
    Column("PRIO", is_right=True, is_spare=True),
    Column("TIME", is_right=True),
    Column("WHY", is_long=True),
)
_STATE_AT = 1
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
_UNFINISHED = [state for state in STATES if state not in ("failed", "rejected", "succeeded", "cancelled")]
# Beside the rows: the counts, a notice, the headings, what more there is, and the next prompt.
_OTHER_LINES = 5


def run(typed: Typed) -> int:
    limit = _limit(typed.text("limit"))
    query = {"ids": " ".join(typed.words), "state": typed.text("state") or "", "all": "1" if typed.flag("all") else ""}
    answer = _ask({name: value for name, value in query.items() if value}, limit)
    if typed.flag("json"):
        say_json(answer)
        return 0
    for line in _head(answer):
        say(line)
    if answer["jobs"]:
        _say_rows(answer["jobs"])
        _say_more(answer, query)
    return 0


def _limit(typed: str | None) -> int:
    if typed is None:
        lines = room()[1]
        return 50 if lines is None else max(20, lines - _OTHER_LINES)
    if not typed.isascii() or not typed.isdigit() or int(typed) == 0:
        raise UserError(f"--limit '{typed}' is not a number of jobs", hint="write it as --limit 100")
    return int(typed)


def _ask(query: dict[str, str], limit: int) -> "dict[str, Any]":
    """The daemon answers a page at a time."""
    with connect(start=True) as client:
        answer: dict[str, Any] = client.request("GET", "/jobs", query={**query, "limit": str(limit)})
        while answer["next"] is not None and len(answer["jobs"]) < limit:
            left = str(limit - len(answer["jobs"]))
            page = client.request("GET", "/jobs", query={**query, "limit": left, "after": str(answer["next"])})
            answer = {**page, "jobs": answer["jobs"] + page["jobs"]}
        return answer


def _head(answer: "dict[str, Any]") -> list[str]:
    dot = " · " if is_unicode() else ", "
    told = [f"{answer['counts'][state]} {state}" for state in STATES if answer["counts"].get(state)]
    if not told:
        told = ["The queue is empty. Put a program into it: gpuyard submit -- python train.py"]
    elif not answer["jobs"]:
        told.append("no job is as asked for")
    lines = [paint(dot.join(told), "bold")]
    if answer["paused"]:
        lines.append(paint("Paused: nothing new starts. `gpuyard unpause` goes on.", "yellow"))
    if answer["draining"]:
        lines.append(paint("Draining: what runs comes to its end. `gpuyard unpause` goes on.", "yellow"))
    return lines


def _say_rows(jobs: "list[dict[str, Any]]") -> None:
    heading, *lines = lay_out(COLUMNS, [_cells(job) for job in jobs], room()[0], ellipsis())
    say(paint(line_of(heading), "dim"))
    for job, cells in zip(jobs, lines, strict=True):
        cells[_STATE_AT] = paint(cells[_STATE_AT], STATES[job["state"]][1])
        say(line_of(cells))


def _cells(job: "dict[str, Any]") -> list[str]:
    name = job["name"] and (job["name"] if job["index"] is None else f"{job['name']}[{job['index']}]")
    elapsed = job["waited_s"] if job["elapsed_s"] is None else job["elapsed_s"]
    return [
        str(job["id"]),
        _state_text(job["state"]),
        name or job["command"],
        devices_text(job),
        memory_text(job),
        str(job["priority"]),
        duration_text(elapsed),
        result_text(job),
    ]


def _state_text(state: str) -> str:
    return f"{STATES[state][0]} {state}" if is_terminal(sys.stdout) and is_unicode() else state


def _say_more(answer: "dict[str, Any]", query: dict[str, str]) -> None:
    if answer["next"] is None:
        return
    more = _count_more(answer, query)
    how = f"`gpuyard queue --limit {10 * len(answer['jobs'])}` shows more of them"
    say(paint(f"and {more} more: {how}" if more > 0 else f"and more: {how}", "dim"))


def _count_more(answer: "dict[str, Any]", query: dict[str, str]) -> int:
    """How many jobs of those asked for are not shown; 0 where that is not known."""
    if query["ids"]:
        return 0
    states = query["state"].split(",") if query["state"] else [*STATES] if query["all"] else _UNFINISHED
    total = int(sum(answer["counts"].get(state, 0) for state in states))
    return total - sum(job["state"] in states for job in answer["jobs"])
