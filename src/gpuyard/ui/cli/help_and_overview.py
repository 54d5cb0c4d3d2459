"""What `gpuyard` shows without a verb: the help of the program and of each verb, made from the tables; what is
meant by a word that is no verb; and on a terminal the GPUs and the queue, for which no daemon is started.
"""

import difflib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence

from gpuyard.client.fast_http import NoDaemon, connect
from gpuyard.errors import UserError
from gpuyard.model.option import Option
from gpuyard.model.units import UNKNOWN, format_gigabytes
from gpuyard.ui.cli.command_grammar import HELP, Answer, Verb, run_verb, unknown_word
from gpuyard.ui.cli.jobs.job_text import say_page
from gpuyard.ui.cli.terminal import paint, say, table_lines, terminal_size
from gpuyard.ui.cli.text_table import make_columns
from gpuyard.ui.cli.verbs import (
    EVERYDAY,
    EXIT_USAGE,
    JOB_VERBS,
    MACHINE_VERBS,
    RECIPES,
    SERVICE_VERBS,
    VERBS,
    import_verb,
)
from gpuyard.version import __version__

# What is typed in place of a command below a verb.
_COMMANDS_BELOW = {"undrain": "devices undrain", "clear": "devices clear"}
# What people know from other programs, by the command that does it here.
_KNOWN_ELSEWHERE = {
    "queue": "status ls ps list jobs squeue qstat stat",
    "cancel": "kill rm stop delete del remove abort scancel qdel terminate",
    "submit": "add enqueue sbatch qsub new push",
    "logs": "log cat output",
    "logs -f": "follow tail",
    "show": "info describe inspect details get",
    "retry": "rerun restart again redo",
    "resubmit": "clone copy",
    "edit": "change modify update set alter",
    "devices": "gpus gpu smi nvidia-smi nodes sinfo",
    "top": "htop nvtop monitor",
    "web": "ui dashboard page browser",
    "release": "continue start unhold",
    "run": "exec srun",
    "--help": "help man commands",
    "clean": "purge prune gc",
    "why": "explain",
}
_OVERVIEW = Verb(
    """gpuyard watches the GPUs of this machine, and runs a queue of jobs on them.

    Without a command it shows the GPUs and the queue.

    Exit status: 0 success, 1 a problem on this machine, 2 a mistake in the command line or its input, 3 not found, 4
    the job can never run on this machine, 5 a job failed, 6 a job was cancelled, 7 only held jobs are left, 124 not in
    time, 130 interrupted.
    """,
    (Option("version", "flag", None, "Show the version and exit."),),
)


def run_without_verb(words: Sequence[str]) -> int:
    word = words[0] if words else ""
    if word == "--version":
        sys.stdout.write(f"gpuyard {__version__}\n")
    elif word in ("-h", "--help"):
        sys.stdout.write(_overview())
    elif not word:
        sys.stderr.write(_overview())
        return EXIT_USAGE
    elif word.startswith("-"):
        raise unknown_word(f"there is no option '{word}'", word, ["--help", "--version"], "see `gpuyard --help`")
    else:
        elsewhere = {known: verb for verb, words in _KNOWN_ELSEWHERE.items() for known in words.split()}
        known = {**{verb: verb for verb in VERBS}, **_COMMANDS_BELOW, **elsewhere}
        lower = word.lower()
        near = [lower] if lower in known else difflib.get_close_matches(lower, known, n=1, cutoff=0.7)
        hint = f"did you mean `gpuyard {known[near[0]]}`?" if near else "see `gpuyard --help`"
        raise UserError(f"there is no command '{word}'", hint=hint)
    return 0


def verb_help(name: str, verb: Verb) -> str:
    """Return usage, text, options under their headings, and the commands below the verb."""
    metavar = "" if verb.arguments is None else verb.arguments.metavar
    if verb.commands and not metavar:
        metavar = "[COMMAND] [ARGS]..."
    return _page(f"{name} [OPTIONS] {metavar}".rstrip(), verb, _sections(verb))


def _overview() -> str:
    folded = {"Jobs": JOB_VERBS, "Queue": SERVICE_VERBS, "Recipes": RECIPES, "Machine": MACHINE_VERBS}
    others = [
        (title, ", ".join(each for each in sorted(verbs) if each not in EVERYDAY)) for title, verbs in folded.items()
    ]
    verbs = [
        ("Every day", [(verb, VERBS[verb]) for verb in EVERYDAY]),
        ("All others, each with its own --help", others),
    ]
    return _page("[OPTIONS] COMMAND [ARGS]...", _OVERVIEW, [*_sections(_OVERVIEW), *verbs])


def _sections(verb: Verb) -> "Iterator[tuple[str, list[tuple[str, str]]]]":
    """Yield the headings with their rows; options without a heading come last, as `--help` does."""
    shown: dict[str, list[tuple[str, str]]] = {}
    for option in (*verb.options, HELP):
        if not option.is_hidden:
            short = f"-{option.short}, " if option.short else ""
            row = f"{short}--{option.name} {option.metavar or ''}".rstrip(), option.help_with_default
            shown.setdefault(option.heading if verb.has_headings else "", []).append(row)
    others = shown.pop("")
    yield from shown.items()
    yield "Other options" if shown else "Options", others
    below = sorted(
        (name, inspect.cleandoc(each.VERB.text).partition("\n\n")[0]) for name, each in verb.commands.items()
    )
    yield "Commands", [(name, re.split(r"(?<=\.)\s", text, maxsplit=1)[0].replace("\n", " ")) for name, text in below]


def _page(
    usage: str,
    verb: Verb,
    sections: "Sequence[tuple[str, list[tuple[str, str]]]] | Iterator[tuple[str, list[tuple[str, str]]]]",
) -> str:
    width = max(50, min(98, (terminal_size()[0] or 80) - 2))
    begin = "Usage: gpuyard "
    lines = textwrap.wrap(begin + usage, width, subsequent_indent=" " * len(begin))
    for paragraph in inspect.cleandoc(verb.text).split("\n\n"):
        first, *others = paragraph.strip("\n").split("\n")
        if first.strip() == "\b":  # the lines stay as they are
            lines += ["", *(f"  {line}" for line in others)]
        else:
            lines += ["", *textwrap.wrap(paragraph, width, initial_indent="  ", subsequent_indent="  ")]
    for heading, rows in sections:
        lines += ["", f"{heading}:", *_rows(rows, width)] if rows else []
    return "\n".join([*lines, ""])


def _rows(rows: list[tuple[str, str]], width: int) -> Iterator[str]:
    """Yield the rows as two columns; a name that is too long for its column has a line of its own."""
    widest = min(30, max(len(name) for name, _ in rows)) + 2
    for name, text in rows:
        first, *others = textwrap.wrap(text, max(10, width - widest - 2)) or [""]
        is_long = len(name) > widest - 2
        yield f"  {name}" if is_long else f"  {name:{widest}}{first}"
        for line in [first, *others] if is_long else others:
            yield f"  {'':{widest}}{line}"


_HELP = "`gpuyard --help` lists all commands"


def show_overview() -> int:
    try:
        daemon = connect(start=False)
    except NoDaemon:
        run_verb("devices", import_verb("devices"), [])
        say("", "No queue is running: `gpuyard submit -- python train.py` starts it.", paint(_HELP, "dim"))
        return 0
    with daemon:
        devices = daemon.request("GET", "/devices")["devices"]
        # Besides the GPUs and the jobs: headings, counts, empty lines, the last line and the prompt.
        limit = max(5, (terminal_size()[1] or 24) - len(devices) - 9)
        answer = daemon.request("GET", "/jobs", {"limit": str(limit)})
    columns = make_columns(
        "GPU", "NAME", "LOAD", "MEMORY", "JOBS", right=("GPU", "LOAD", "MEMORY"), long=("NAME", "JOBS")
    )
    if devices:
        say(*table_lines(columns, [_cells(device) for device in devices]))
    else:
        say("no GPU was found: `gpuyard doctor` says why")
    say("")
    say_page(answer)
    say(paint(_HELP, "dim"))
    return 0


def _cells(device: Answer) -> list[str]:
    load, used, total = device["utilization_percent"], device["memory_used_mb"], device["memory_total_mb"]
    closed = device["fault"] or ("drained" if device["drain"] else "banned" if device["banned"] else "")
    jobs = [
        f"job {lease['job']}" if lease["is_own"] and lease["job"] is not None else str(lease["who"])
        for lease in device["leases"]
    ]
    return [
        device["label"] or UNKNOWN,
        device["name"] or UNKNOWN,
        UNKNOWN if load is None else f"{load:.0f}%",
        f"{format_gigabytes(used)}/{format_gigabytes(total)} GB",
        ", ".join(filter(None, jobs)) or closed or "idle",
    ]
