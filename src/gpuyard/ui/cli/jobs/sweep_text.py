"""Sweeps and arrays as text: what would be submitted, progress in one line, and the table of their runs."""

import sys

from gpuyard.errors import UserError
from gpuyard.model.units import UNKNOWN, format_count, format_duration
from gpuyard.ui.cli.command_grammar import Answer, Typed
from gpuyard.ui.cli.jobs.job_text import STATES, devices_text, result_text, running_text, value_text
from gpuyard.ui.cli.jobs.queue import read_rows
from gpuyard.ui.cli.terminal import is_terminal, note, paint, say, say_json, table_lines
from gpuyard.ui.cli.text_table import Column, clean


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


def show_sweep(typed: Typed, limit: int) -> int:
    job_id = typed.text("sweep") or ""
    if not job_id.isascii() or not job_id.isdigit():
        raise UserError(f"--sweep '{job_id}' is not the id of a job", hint="give the id of any of its jobs, such as 17")
    if typed.arguments:
        raise UserError("--sweep and IDS do not go together", hint="give one of them")
    query = {"sort": typed.text("sort") or "", "state": typed.text("state") or ""}
    answer = read_rows(f"/sweeps/{job_id}", query, limit)
    if typed.flag("json"):
        say_json(answer)
        return 0
    say(*_sweep_lines(answer, has_symbols=is_terminal(sys.stdout)))
    more = answer["total"] - len(answer["jobs"])
    if more > 0:
        say(paint(f"and {more:,} more: --limit {10 * len(answer['jobs'])} shows more", "dim"))
    return 0


def _sweep_lines(answer: Answer, *, has_symbols: bool) -> list[str]:
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
