"""`gpuyard estimates`: what was learned about programs, and forgetting it."""

from gpuyard.connect.fast_http import connect
from gpuyard.errors import UserError
from gpuyard.ui.cli.terminal import paint, room, say, say_json, say_table
from gpuyard.ui.cli.text_table import UNKNOWN, Column, count_text, duration_text, size_text, time_text
from gpuyard.ui.cli.verb_options import JSON, Arguments, Option, Typed, Verb

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VERB = Verb(
    """List what was learned about programs: the memory they are given, what they used, how long they take.

    A command stands for itself alone; a program, for commands of which nothing is known but what they run. MEMORY is
    what the next run is given, PEAK the most that one used of late, OFF how far the last prediction was off.

    \b
    gpuyard estimates forget 6bc82145      by its ID, or several
    gpuyard estimates forget train.py      all whose command contains this
    gpuyard estimates forget --all
    """,
    (
        Option("limit", "N", "At most so many. [what fits the terminal; 50 in a pipe]"),
        Option("all", None, "With `forget`: everything that was learned."),
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
    verb, *words = typed.words or ["list"]
    if verb == "forget":
        return _forget(typed, words)
    if typed.words:
        raise UserError(f"`gpuyard estimates {verb}` is not understood", hint="write gpuyard estimates forget TEXT")
    if typed.flag("all"):
        raise UserError("--all goes with `forget`", hint="--limit 1000 lists more")
    return _list(typed)


def _list(typed: Typed) -> int:
    query = {"limit": str(_limit(typed.text("limit")))}
    with connect(start=True) as daemon:
        answer = daemon.request("GET", "/estimates", query)
    if typed.flag("json"):
        say_json(answer)
    elif answer["estimates"]:
        say_table(_COLUMNS, list(map(_cells, answer["estimates"])))
        if answer["more"]:
            say(paint("and more: `gpuyard estimates --limit 1000` shows them", "dim"))
    else:
        say("Nothing has been learned yet: a job that comes to its end teaches.")
    return 0


def _limit(typed: str | None) -> int:
    if typed is None:
        lines = room()[1]
        return 50 if lines is None else max(20, lines - _OTHER_LINES)
    if not typed.isascii() or not typed.isdigit() or int(typed) == 0:
        raise UserError(f"--limit '{typed}' is not a number of estimates", hint="write it as --limit 100")
    return int(typed)


def _cells(one: "dict[str, Any]") -> list[str]:
    return [
        one["fingerprint"][:_SHORT_ID],
        one["kind"],
        str(one["runs"]),
        size_text(one["memory_mb"]),
        size_text(one["peak_mb"]),
        size_text(one["ram_mb"]),
        UNKNOWN if one["load_percent"] is None else f"{one['load_percent']:.0f}%",
        duration_text(one["mean_s"]),
        UNKNOWN if one["off_percent"] is None else f"{one['off_percent']:+.0f}%",
        time_text(one["seen_at"])[:-3],
        one["label"],
    ]


def _forget(typed: Typed, words: list[str]) -> int:
    if bool(words) == typed.flag("all"):
        raise UserError(
            "which estimates should be forgotten?", hint="write gpuyard estimates forget train.py, or --all"
        )
    body = {"words": words} if words else {"all": True}
    with connect(start=True) as daemon:
        answer = daemon.request("POST", "/estimates/forget", body=body)
    if typed.flag("json"):
        say_json(answer)
    else:
        say(f"forgot {count_text(answer['forgotten'], 'estimate')}")
    return 0
