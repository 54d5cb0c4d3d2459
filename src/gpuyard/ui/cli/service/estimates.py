"""`gpuyard estimates`: lists and deletes learned estimates of memory and time."""

from gpuyard.core.units import UNKNOWN, format_count, format_duration, format_size, format_time
from gpuyard.errors import UserError
from gpuyard.ui.cli.ask_daemon import request, say_answer
from gpuyard.ui.cli.jobs.queue import read_limit
from gpuyard.ui.cli.terminal import paint, table_lines
from gpuyard.ui.cli.text_table import Column
from gpuyard.ui.cli.verb_options import JSON, Answer, Arguments, Option, Typed, Verb

VERB = Verb(
    """List or delete learned estimates of the memory and time that programs need.

    KIND is command (one exact command line) or program (any command line of that program without an estimate of its
    own). MEMORY is what the next run gets, PEAK the highest recent use, OFF the error of the last prediction.

    \b
    gpuyard estimates forget 6bc82145      by ID; several are possible
    gpuyard estimates forget train.py      all with this text in their command
    gpuyard estimates forget --all
    """,
    (
        Option("limit", "N", "At most N estimates. [what fits the terminal; 50 in a pipe]"),
        Option("all", None, "With `forget`: all estimates."),
        JSON,
    ),
    Arguments("[forget ID...|TEXT]", is_many=True),
)
_COLUMNS = (
    Column("ID"),
    Column("KIND"),
    Column("RUNS", is_right=True),
    Column("MEMORY", is_right=True),
    Column("PEAK", is_right=True),
    Column("RAM", is_right=True, is_spare=True),
    Column("LOAD", is_right=True, is_spare=True),
    Column("TIME", is_right=True),
    Column("OFF", is_right=True),
    Column("SEEN", is_spare=True),
    Column("PROGRAM", is_long=True),
)
_SHORT_ID = 8
_OTHER_LINES = 3


def run(typed: Typed) -> int:
    verb, *names = typed.arguments or ["list"]
    if verb == "forget":
        return _forget(typed, names)
    if typed.arguments:
        raise UserError(f"`gpuyard estimates` has no command '{verb}'", hint="write gpuyard estimates forget TEXT")
    if typed.flag("all"):
        raise UserError("--all needs `forget`", hint="--limit 1000 lists more")
    answer = request("GET", "/estimates", {"limit": str(read_limit(typed, "estimates", _OTHER_LINES))})
    if not answer["estimates"]:
        return say_answer(typed, answer, "No estimates yet: gpuyard learns from each job that finishes.")
    more = [paint("and more: `gpuyard estimates --limit 1000` lists them", "dim")] if answer["more"] else []
    return say_answer(typed, answer, *table_lines(_COLUMNS, list(map(_cells, answer["estimates"]))), *more)


def _cells(estimate: Answer) -> list[str]:
    return [
        estimate["fingerprint"][:_SHORT_ID],
        estimate["kind"],
        str(estimate["runs"]),
        format_size(estimate["memory_mb"]),
        format_size(estimate["peak_mb"]),
        format_size(estimate["ram_mb"]),
        UNKNOWN if estimate["load_percent"] is None else f"{estimate['load_percent']:.0f}%",
        format_duration(estimate["mean_s"]),
        UNKNOWN if estimate["off_percent"] is None else f"{estimate['off_percent']:+.0f}%",
        format_time(estimate["seen_at"])[:-3],
        estimate["label"],
    ]


def _forget(typed: Typed, names: list[str]) -> int:
    if bool(names) == typed.flag("all"):
        raise UserError("which estimates should be deleted?", hint="write gpuyard estimates forget train.py, or --all")
    body = {"words": names} if names else {"all": True}
    answer = request("POST", "/estimates/forget", body=body)
    return say_answer(typed, answer, f"deleted {format_count(answer['forgotten'], 'estimate')}")
