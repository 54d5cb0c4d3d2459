"""`gpuyard submit`: puts a program, or many of them, into the queue."""

import os
import sys

from gpuyard.connect.config_digest import digest_of
from gpuyard.connect.fast_http import connect
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.ui.cli.terminal import note, say, say_json
from gpuyard.ui.cli.verb_options import JSON, Arguments, Option, Typed, Verb

VERB = Verb(
    """Put a program into the queue; it runs when there is room for it.

    It prints the job's id, or the first and the last id of many, such as 18-117. The job gets this shell's environment
    and directory, and outlives this terminal. The daemon that runs the queue is started by itself.

    \b
    gpuyard submit -- python train.py --lr 3e-4
    gpuyard submit --sweep lr=1e-3,1e-4 --sweep seed=0-4 -- python train.py --lr {lr} --seed {seed}
    gpuyard submit --array 0-99%4 -- python part.py {index}
    gpuyard submit --from runs.csv -- python train.py --lr {lr}
    gpuyard submit --from commands.txt
    """,
    (
        Option("gpus", "N", "How many GPUs; 0 for none. [1]"),
        Option("vram", "SIZE", "Reserve this much memory on each GPU. [learned]"),
        Option("exclusive", None, "Be alone on the GPU."),
        Option("ram", "SIZE", "How much RAM it takes: that much has to be there when it starts."),
        Option("cpus", "N", "How many CPUs it takes, for engines that count them."),
        Option("engine", "NAME", "What runs it: local, slurm or ray. [local, or the configuration's]"),
        Option("engine-option", "TEXT", "For it alone, such as --engine-option=--partition=big.", is_repeatable=True),
        Option("device", "LIST", "Only of these GPUs, such as 0,2 or a GPU's id."),
        Option("vendor", "NAME", "Only GPUs of this vendor: nvidia, amd, intel or apple."),
        Option("gpu-name", "TEXT", "Only GPUs whose name contains this, such as H100."),
        Option("max-cpu", "P", "Start at no more than P percent CPU use."),
        Option("min-free-mem-mb", "M", "Start with at least M MB of RAM available."),
        Option("max-gpu", "P", "Only GPUs at no more than P percent use."),
        Option("max-gpu-mem-mb", "M", "Only GPUs with at most M MB of memory used."),
        Option("max-power-w", "W", "Only GPUs that draw no more than W watts."),
        Option("priority", "N", "Higher starts earlier. [0]"),
        Option("preempt", None, "Have jobs of lower priority make room; raises the priority to 100 unless given."),
        Option("on-preempt", "WHAT", "If it has to make room itself: suspend, requeue or never. [suspend]"),
        Option("after", "IDS", "Start after these have succeeded.", is_repeatable=True),
        Option("after-any", "IDS", "Start after these have finished in any way.", is_repeatable=True),
        Option("after-failed", "IDS", "Start after these have failed.", is_repeatable=True),
        Option("retries", "N", "Try again so often after a failure. [0]"),
        Option("time-limit", "TIME", "End it after this long, such as 4h."),
        Option("grace", "TIME", "How long it may take to end once it is told to. [10s]"),
        Option("duration", "TIME", "How long it takes, for estimates."),
        Option("name", "TEXT", "What the queue calls it, in one word. [its command]"),
        Option("tag", "TEXT", "Marks jobs that belong together: `gpuyard cancel tag=TEXT`."),
        Option("array", "RANGE", "A job for each {index}: 0-99, 0-99:5 for each fifth, 0-99%8 for at most 8 at once."),
        Option("sweep", "NAME=VALUES", "A job for each {NAME}: lr=1e-3,1e-4 or seed=0-4; several make all pairs.",
               is_repeatable=True),
        Option("env", "NAME=VALUE", "Set this variable as well.", is_repeatable=True),
        Option("stdin", "FILE", "What it reads as standard input. [nothing]"),
        Option("on-reboot", "WHAT", "If the machine restarts meanwhile: requeue, hold or fail."),
        Option("notify", "[EVENTS=]TARGET", "Tell this command or URL of it: finished,failed,out-of-memory=TARGET.",
               is_repeatable=True),
        Option("hold", None, "Keep it from starting until `gpuyard release`."),
        Option("log-cap", "SIZE", "Keep about this much of its output. [256M]"),
        Option("from", "FILE", "A command per line; with a command, a CSV file whose columns fill in its {NAMES}."),
        Option("cwd", "DIR", "Run it there. [here]"),
        JSON,
    ),
    Arguments("-- CMD...", is_program=True),
)  # fmt: skip
_OWN = ("from", "cwd", "json")


def run(typed: Typed) -> int:
    source = typed.text("from")
    if not typed.words and source is None:
        raise UserError("there is no program to run", hint="write it last: gpuyard submit -- python train.py")
    if typed.text("name") == "":
        raise UserError("--name is empty", hint="give it a word, or leave it out")
    text = None if source is None else _read(source)
    directory = _directory(typed)
    body = {
        "token": os.urandom(16).hex(),
        "command": typed.words or None,
        "table": text if typed.words else None,
        "list": None if typed.words else text,
        "cwd": directory,
        "configuration": digest_of(typed.words, directory),
        "environment": dict(os.environ),
        "options": _options(typed),
    }
    with connect(start=True) as daemon:
        answer = daemon.request("POST", "/submissions", body=body, is_repeatable=True)
    for line in answer["notes"]:
        note(f"gpuyard: {line}")
    if typed.flag("json"):
        say_json(answer)
    else:
        say(answer["ids"])
    return 0


def _directory(typed: Typed) -> str:
    named = typed.text("cwd")
    path = _absolute(named or ".")
    if named is not None and not os.path.isdir(path) and not _comes_later(typed):
        raise UserError(f"--cwd: there is no directory '{named}'", hint="make it first, or name another")
    return path


def _options(typed: Typed) -> "dict[str, str | bool | list[str]]":
    """Those that are the daemon's. It works in another directory, so a file is named in full."""
    options = {name: value for name, value in typed.options.items() if name not in _OWN}
    named = typed.text("stdin")
    if named is not None:
        options["stdin"] = path = _absolute(named)
        if (not os.path.exists(path) or os.path.isdir(path)) and not _comes_later(typed):
            raise UserError(f"--stdin: there is no file '{named}'", hint="it is looked for from this directory")
    return options


def _comes_later(typed: Typed) -> bool:
    """What a job that waits for others needs may be what those others make."""
    return any(name in typed.options for name in ("after", "after-any", "after-failed"))


def _absolute(path: str) -> str:
    try:
        return os.path.abspath(path)
    except FileNotFoundError:
        raise UserError("the current directory is no longer there", hint="go elsewhere, or give --cwd DIR") from None


def _read(source: str) -> str:
    try:
        if source == "-":
            return sys.stdin.buffer.read().decode()
        with open(source, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError:
        raise UserError(f"{source} is not UTF-8 text", hint="save it as UTF-8") from None
    except (FileNotFoundError, IsADirectoryError):
        raise UserError(f"--from: there is no file '{source}'", hint="- reads standard input") from None
    except OSError as error:
        raise EnvironmentFault(f"--from {source} cannot be read: {error.strerror}") from error
