"""`gpuyard queue`: running, waiting and finished jobs."""

import sys

from gpuyard.connect.fast_http import connect
from gpuyard.core.units import format_duration
from gpuyard.errors import UserError
from gpuyard.ui.cli.ask_daemon import selection_text
from gpuyard.ui.cli.jobs import job_text
from gpuyard.ui.cli.jobs.job_text import STATES, UNFINISHED
from gpuyard.ui.cli.jobs.progress_text import running_text
from gpuyard.ui.cli.terminal import ellipsis, is_terminal, is_unicode, paint, say, say_json, terminal_size
from gpuyard.ui.cli.text_table import Column, clean, join_cells, lay_out
from gpuyard.ui.cli.verb_options import IDS_HELP, JSON, Answer, Arguments, Option, Typed, Verb

VERB = Verb(
    "Show running, waiting and finished jobs, and why jobs wait.\n\n"
    "Running jobs come first, then waiting ones in the order in which they would start, then those that finished last; "
    "with IDS, all that match in the order of their ids. Each sweep and array is one line; --sweep shows its runs, "
    "with a column for each value that varies. With IDS, --state or --json, and with --open, each job is one line.\n\n"
    f"{IDS_HELP}",
    (
        Option("sweep", "ID", "Show the runs of the sweep or array that this job belongs to."),
        Option("sort", "COLUMN", "With --sweep: sort by this column, such as lr, or -lr from the last to the first."),
        Option("open", None, "Show each job of sweeps and arrays."),
        Option("all", None, "Include all finished jobs."),
        Option("state", "STATES", "Only jobs in these states, such as failed,cancelled."),
        Option("limit", "N", "At most N jobs. [what fits the terminal; 50 in a pipe]"),
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
# The lines besides the rows: counts, a notice, headings, how to open a sweep, the number of further jobs, and the next
# prompt.
_OTHER_LINES = 6


def run(typed: Typed) -> int:
    limit = read_limit(typed, "jobs", _OTHER_LINES)
    if typed.text("sweep") is not None:
        from gpuyard.ui.cli.jobs.sweep_text import show_sweep

        return show_sweep(typed, limit)
    if typed.text("sort") is not None:
        raise UserError("--sort goes with --sweep", hint="such as `gpuyard queue --sweep 17 --sort lr`")
    query = {
        "ids": selection_text(typed.arguments),
        "state": typed.text("state") or "",
        "all": "1" if typed.flag("all") else "",
    }
    folds = not (query["ids"] or query["state"] or typed.flag("open") or typed.flag("json"))
    asked = {**query, "fold": "1" if folds else ""}
    answer = _request({name: value for name, value in asked.items() if value}, limit)
    if typed.flag("json"):
        say_json(answer)
        return 0
    say_page(answer, query)
    return 0


def say_page(answer: Answer, query: "dict[str, str] | None" = None) -> None:
    """Print the counts, the jobs, and how many more there are."""
    say(*_head(answer))
    if answer["jobs"]:
        _say_rows(answer["jobs"])
    if is_terminal(sys.stdout) and any(job.get("group") for job in answer["jobs"]):
        say(paint("`gpuyard queue --sweep ID` shows the runs of a sweep or an array", "dim"))
    if answer["next"] is not None:
        say(paint(_more_text(answer, query or {"ids": "", "state": "", "all": ""}), "dim"))


def read_limit(typed: Typed, what: str, other_lines: int) -> int:
    """Return --limit; by default the rows that fit the terminal beside `other_lines`, at least 20; 50 in a pipe."""
    text = typed.text("limit")
    if text is None:
        lines = terminal_size()[1]
        return 50 if lines is None else max(20, lines - other_lines)
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise UserError(f"--limit '{text}' is not a number of {what}", hint="write it as --limit 100")
    return int(text)


def _request(query: dict[str, str], limit: int) -> Answer:
    """Return an answer with up to `limit` jobs; the daemon returns them in pages."""
    with connect(start=True) as client:
        answer: Answer = client.request("GET", "/jobs", query={**query, "limit": str(limit)})
        while answer["next"] is not None and len(answer["jobs"]) < limit:
            left = str(limit - len(answer["jobs"]))
            page = client.request("GET", "/jobs", query={**query, "limit": left, "after": str(answer["next"])})
            answer = {**page, "jobs": answer["jobs"] + page["jobs"]}
        return answer


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


def _say_rows(jobs: list[Answer]) -> None:
    heading, *lines = lay_out(COLUMNS, [_cells(job) for job in jobs], terminal_size()[0], ellipsis())
    say(paint(join_cells(heading), "dim"))
    for job, cells in zip(jobs, lines, strict=True):
        cells[_STATE_AT] = paint(cells[_STATE_AT], STATES[job["state"]][1])
        say(join_cells(cells))


def _cells(job: Answer) -> list[str]:
    state = job["state"]
    return [
        job["group"]["ids"] if job.get("group") else str(job["id"]),
        f"{STATES[state][0]} {state}" if is_terminal(sys.stdout) and is_unicode() else state,
        job_text.job_name(job),
        job_text.devices_text(job),
        job_text.memory_text(job),
        str(job["priority"]),
        format_duration(job_text.elapsed_seconds(job)),
        running_text(job, is_unicode=is_unicode()) or job_text.result_text(job),
    ]


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
