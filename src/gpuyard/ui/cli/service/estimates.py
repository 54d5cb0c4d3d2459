"""`gpuyard estimates`: lists, deletes, exports and imports learned estimates of memory and time."""

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.model.option import Option
from gpuyard.model.units import UNKNOWN, format_count, format_duration, format_size, format_time
from gpuyard.ui.cli.ask_daemon import request, say_answer
from gpuyard.ui.cli.command_grammar import JSON, Answer, Arguments, Typed, Verb
from gpuyard.ui.cli.jobs.queue import read_limit
from gpuyard.ui.cli.terminal import paint, table_lines
from gpuyard.ui.cli.text_table import make_columns

VERB = Verb(
    """List, delete, export or import learned estimates of the memory and time that programs need.

    \b
    gpuyard estimates                      list them
    gpuyard estimates forget 6bc82145      delete by ID; several are possible
    gpuyard estimates forget train.py      delete all with this text in their command
    gpuyard estimates forget --all
    gpuyard estimates export FILE          write all as JSON; - is standard output
    gpuyard estimates import FILE          on another machine: what was learned there stays

    KIND is command (one exact command line) or program (any command line of that program without an estimate of its
    own). MEMORY is what the next run gets, PEAK the highest recent use, OFF the error of the last prediction.
    """,
    (
        Option("limit", "text", "N", "At most N estimates. [what fits the terminal; 50 in a pipe]",
               heading="Common options"),
        JSON.but(heading="Common options"),
        Option("all", "flag", None, "Delete all estimates.", heading="With forget"),
        Option("replace", "flag", None, "Replace estimates that were learned here.", heading="With import"),
    ),
    Arguments("[forget ID...|TEXT | export FILE | import FILE]", is_many=True),
    has_headings=True,
)  # fmt: skip
_FORMAT = "gpuyard estimates 1"


def run(typed: Typed) -> int:
    verb, *names = typed.arguments or ["list"]
    if verb == "forget":
        return _forget(typed, names)
    if verb in ("export", "import"):
        if len(names) != 1:
            raise UserError(f"`gpuyard estimates {verb}` takes one file", hint=f"write gpuyard estimates {verb} FILE")
        return (_export if verb == "export" else _import)(typed, names[0])
    if typed.arguments:
        hint = "write gpuyard estimates forget TEXT, export FILE or import FILE"
        raise UserError(f"`gpuyard estimates` has no command '{verb}'", hint=hint)
    if typed.flag("all"):
        raise UserError("--all needs `forget`", hint="--limit 1000 lists more")
    answer = request("GET", "/estimates", {"limit": str(read_limit(typed, "estimates", other_lines=3))})
    if not answer["estimates"]:
        return say_answer(typed, answer, "No estimates yet: gpuyard learns from each job that finishes.")
    more = [paint("and more: `gpuyard estimates --limit 1000` lists them", "dim")] if answer["more"] else []
    columns = make_columns(
        "ID", "KIND", "RUNS", "MEMORY", "PEAK", "RAM", "LOAD", "TIME", "OFF", "SEEN", "PROGRAM", long=("PROGRAM",),
        right=("RUNS", "MEMORY", "PEAK", "RAM", "LOAD", "TIME", "OFF"), spare=("RAM", "LOAD", "SEEN"),
    )  # fmt: skip
    return say_answer(typed, answer, *table_lines(columns, list(map(_cells, answer["estimates"]))), *more)


def _cells(estimate: Answer) -> list[str]:
    return [
        estimate["fingerprint"][:8],
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


def _export(typed: Typed, name: str) -> int:
    import json
    import sys

    from gpuyard.system.write_files import write_results

    answer = request("GET", "/estimates/export")
    found = answer["estimates"]
    while answer["next"] is not None:
        answer = request("GET", "/estimates/export", {"after": answer["next"]})
        found += answer["estimates"]
    content = json.dumps({"format": _FORMAT, "estimates": found}, indent=1, ensure_ascii=False) + "\n"
    if name == "-":
        sys.stdout.write(content)
        return 0
    write_results(name, content.encode(), exact_mode=0o600)
    return say_answer(typed, {"file": name, "estimates": len(found)}, f"wrote {format_count(len(found), 'estimate')}")


def _import(typed: Typed, name: str) -> int:
    estimates, total, at_once = _read_file(name), {"imported": 0, "kept": 0}, 500
    for start in range(0, len(estimates), at_once):
        body = {"estimates": estimates[start : start + at_once], "replace": typed.flag("replace")}
        answer = request("POST", "/estimates/import", body=body, is_repeatable=True)
        total = {key: total[key] + answer[key] for key in total}
    kept = f"; {total['kept']} were learned here and stay (--replace replaces them)" if total["kept"] else ""
    return say_answer(typed, total, f"imported {format_count(total['imported'], 'estimate')}{kept}")


def _read_file(name: str) -> "list[Answer]":
    import json
    import sys

    hint = "`gpuyard estimates export FILE` makes such a file"
    try:
        with open(sys.stdin.fileno() if name == "-" else name, encoding="utf-8", closefd=name != "-") as file:
            content = json.load(file)
    except OSError as error:
        raise EnvironmentFault(f"{name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is not JSON: {error}", hint=hint) from None
    found = content.get("estimates") if isinstance(content, dict) and content.get("format") == _FORMAT else None
    if not isinstance(found, list):
        raise UserError(f"{name} has no exported estimates", hint=hint)
    return found


def _forget(typed: Typed, names: list[str]) -> int:
    if bool(names) == typed.flag("all"):
        raise UserError("which estimates should be deleted?", hint="write gpuyard estimates forget train.py, or --all")
    body = {"words": names} if names else {"all": True}
    answer = request("POST", "/estimates/forget", body=body)
    return say_answer(typed, answer, f"deleted {format_count(answer['forgotten'], 'estimate')}")
