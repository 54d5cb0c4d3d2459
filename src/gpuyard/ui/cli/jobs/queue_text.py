"""The jobs of the queue as text: counts, notices, a row for each, and how many more there are."""

import sys

from gpuyard.ui.cli.jobs.job_text import STATES, UNFINISHED, job_cells, state_style
from gpuyard.ui.cli.terminal import is_terminal, is_unicode, paint, say, table_lines
from gpuyard.ui.cli.text_table import Column, clean
from gpuyard.ui.cli.verb_options import Answer

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


def say_page(answer: Answer, query: "dict[str, str] | None" = None) -> None:
    say(*_head(answer))
    if jobs := answer["jobs"]:
        say(*table_lines(COLUMNS, list(map(_cells, jobs)), [state_style(job) for job in jobs]))
    if is_terminal(sys.stdout) and any(job.get("group") for job in answer["jobs"]):
        say(paint("`gpuyard queue --sweep ID` shows the runs of a sweep or an array", "dim"))
    if answer["next"] is not None:
        say(paint(_more_text(answer, query or {"ids": "", "state": "", "all": ""}), "dim"))


def _head(answer: Answer) -> list[str]:
    dot = " · " if is_unicode() else ", "
    facts = [f"{answer['counts'][state]} {state}" for state in STATES if answer["counts"].get(state)]
    if not facts:
        facts = ["The queue is empty. Submit a job: gpuyard submit -- python train.py"]
    elif not answer["jobs"]:
        facts.append("no jobs match")
    lines = [paint(dot.join(facts), "bold")]
    if answer["paused"]:
        lines.append(paint("Paused: no new jobs start. `gpuyard unpause` starts them again.", "yellow"))
    if answer["draining"]:
        lines.append(paint("Draining: running jobs finish, no new ones start. `gpuyard unpause` ends it.", "yellow"))
    return [*lines, *(paint(f"! {clean(notice)}", "yellow") for notice in answer.get("notices", ()))]


def _cells(job: Answer) -> list[str]:
    cells = job_cells(job, is_unicode=is_unicode(), has_symbols=is_terminal(sys.stdout))
    return [cells[column.heading] for column in COLUMNS]


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
