"""`gpuyard queue`: running, waiting and finished jobs."""

import sys

from gpuyard.client.fast_http import connect
from gpuyard.errors import UserError
from gpuyard.model.option import Option
from gpuyard.ui.cli.command_grammar import IDS_HELP, JSON, Answer, Arguments, Typed, Verb

VERB = Verb(
    "Show running, waiting and finished jobs, and why jobs wait.\n\n"
    "Running jobs come first, then waiting ones in the order in which they would start, then those that finished last; "
    "with IDS, all that match in the order of their ids. Each sweep and array is one line; --sweep shows its runs, "
    "with a column for each value that varies. With IDS, --state or --json, and with --open, each job is one line.\n\n"
    f"{IDS_HELP}",
    (
        Option("sweep", "text", "ID", "Show the runs of the sweep or array that this job belongs to."),
        Option("sort", "text", "COLUMN",
               "With --sweep: sort by this column, such as lr, or -lr from the last to the first."),
        Option("open", "flag", None, "Show each job of sweeps and arrays."),
        Option("all", "flag", None, "Include all finished jobs."),
        Option("state", "text", "STATES", "Only jobs in these states, such as failed,cancelled."),
        Option("limit", "text", "N", "At most N jobs. [what fits the terminal; 50 in a pipe]"),
        JSON,
    ),
    Arguments("[IDS]...", is_many=True),
)  # fmt: skip


def run(typed: Typed) -> int:
    # Besides the rows: counts, a notice, headings, how to open a sweep, the number of further jobs, the next prompt.
    limit = read_limit(typed, "jobs", other_lines=6)
    if typed.text("sweep") is not None:
        return _show_sweep(typed, limit)
    if typed.text("sort") is not None:
        raise UserError("--sort goes with --sweep", hint="such as `gpuyard queue --sweep 17 --sort lr`")
    ids = ""
    if typed.arguments:
        from gpuyard.ui.cli.ask_daemon import selection_text

        ids = selection_text(typed.arguments)
    query = {"ids": ids, "state": typed.text("state") or "", "all": "1" if typed.flag("all") else ""}
    folds = not (query["ids"] or query["state"] or typed.flag("open") or typed.flag("json"))
    answer = read_rows("/jobs", {**query, "fold": "1" if folds else ""}, limit)
    from gpuyard.ui.cli.terminal import say_json, tolerate_config_faults

    tolerate_config_faults()
    if typed.flag("json"):
        say_json(answer)
        return 0
    from gpuyard.ui.cli.jobs.job_text import say_page

    say_page(answer, query)
    return 0


def _show_sweep(typed: Typed, limit: int) -> int:
    job_id = typed.text("sweep") or ""
    if not job_id.isascii() or not job_id.isdigit():
        raise UserError(f"--sweep '{job_id}' is not the id of a job", hint="give the id of any of its jobs, such as 17")
    if typed.arguments:
        raise UserError("--sweep and IDS do not go together", hint="give one of them")
    from gpuyard.ui.cli.terminal import is_terminal, paint, say, say_json

    query = {"sort": typed.text("sort") or "", "state": typed.text("state") or ""}
    answer = read_rows(f"/sweeps/{job_id}", query, limit)
    if typed.flag("json"):
        say_json(answer)
        return 0
    from gpuyard.ui.cli.jobs.job_text import sweep_lines

    say(*sweep_lines(answer, has_symbols=is_terminal(sys.stdout)))
    more = answer["total"] - len(answer["jobs"])
    if more > 0:
        say(paint(f"and {more:,} more: --limit {10 * len(answer['jobs'])} shows more", "dim"))
    return 0


def read_limit(typed: Typed, what: str, other_lines: int) -> int:
    """Return --limit; by default the rows that fit the terminal beside `other_lines`, at least 20; 50 in a pipe."""
    text = typed.text("limit")
    if text is None and not sys.stdout.isatty():
        return 50
    if text is None:
        from gpuyard.ui.cli.terminal import terminal_size

        lines = terminal_size()[1]
        return 50 if lines is None else max(20, lines - other_lines)
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise UserError(f"--limit '{text}' is not a number of {what}", hint="write it as --limit 100")
    return int(text)


def read_rows(path: str, query: dict[str, str], limit: int) -> Answer:
    """Return the first `limit` rows of a list, in as many pages as the daemon makes of them."""
    query = {name: value for name, value in query.items() if value}
    with connect(start=True) as client:
        answer: Answer = client.request("GET", path, query={**query, "limit": str(limit)}, meanwhile=_import_text)
        while answer["next"] is not None and len(answer["jobs"]) < limit:
            left = str(limit - len(answer["jobs"]))
            page = client.request("GET", path, query={**query, "limit": left, "after": str(answer["next"])})
            answer = {**page, "jobs": answer["jobs"] + page["jobs"]}
        return answer


def _import_text() -> None:
    """Import what prints the answer, while the daemon works on it."""
    import gpuyard.ui.cli.jobs.job_text  # noqa: F401
