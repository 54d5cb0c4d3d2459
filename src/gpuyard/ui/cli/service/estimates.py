"""`gpuyard estimates`: lists and deletes learned estimates of memory and time."""

from gpuyard.connect.fast_http import connect
from gpuyard.core.units import UNKNOWN, format_count, format_duration, format_size, format_time
from gpuyard.errors import UserError
from gpuyard.ui.cli.jobs.queue import read_limit
from gpuyard.ui.cli.terminal import paint, say, say_json, say_table
from gpuyard.ui.cli.text_table import Column
from gpuyard.ui.cli.verb_options import JSON, Arguments, Option, Typed, Verb

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

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
    return _list(typed)


def _list(typed: Typed) -> int:
    query = {"limit": str(read_limit(typed, "estimates", _OTHER_LINES))}
    with connect(start=True) as daemon:
        answer = daemon.request("GET", "/estimates", query)
    if typed.flag("json"):
        say_json(answer)
    elif answer["estimates"]:
        say_table(_COLUMNS, list(map(_cells, answer["estimates"])))
        if answer["more"]:
            say(paint("and more: `gpuyard estimates --limit 1000` lists them", "dim"))
    else:
        say("No estimates yet: gpuyard learns from each job that finishes.")
    return 0


def _cells(estimate: "dict[str, Any]") -> list[str]:
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
    with connect(start=True) as daemon:
        answer = daemon.request("POST", "/estimates/forget", body=body)
    if typed.flag("json"):
        say_json(answer)
    else:
        say(f"deleted {format_count(answer['forgotten'], 'estimate')}")
    return 0
