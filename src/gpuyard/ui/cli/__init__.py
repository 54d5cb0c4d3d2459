"""The command line: a module per verb, each imported only when it is used.

`command_grammar` parses all command lines by the tables of the verbs. `gpuyard --help` lists the exit statuses. Each
message on standard error says what to try next. With `--json`, standard output has {"error": {"code", "message",
"hint"}}, too.
"""

import gc
import os
import sys

from gpuyard.errors import GpuyardError, UserError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpuyard.ui.cli.command_grammar import Command

EXIT_FAULT, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
EXIT_NOT_FOUND, EXIT_IMPOSSIBLE, EXIT_JOB_FAILED, EXIT_JOB_CANCELLED, EXIT_TIMED_OUT = 3, 4, 5, 6, 124
EXIT_STUCK = 7
# The exit status of an error with this code; others have EXIT_USAGE or EXIT_FAULT.
_EXIT_STATUSES = {"not_found": EXIT_NOT_FOUND, "impossible": EXIT_IMPOSSIBLE, "timeout": EXIT_TIMED_OUT}

JOB_VERBS = {
    "cancel": "Stop running jobs, and take waiting jobs out of the queue.",
    "edit": "Change options of waiting jobs.",
    "history": "Show what happened to a job, event by event.",
    "hold": "Keep waiting jobs from starting.",
    "logs": "Print the output of a job, and follow it.",
    "priority": "Let waiting jobs start earlier or later.",
    "queue": "Show running, waiting and finished jobs, and why jobs wait.",
    "release": "Let held jobs start.",
    "resume": "Let suspended jobs continue.",
    "resubmit": "Submit a job again, with other options or arguments.",
    "retry": "Queue finished jobs again, and those skipped because of them.",
    "show": "Show all details of a job.",
    "submit": "Put a program into the queue; it starts when a GPU has enough free memory.",
    "suspend": "Move the GPU memory of running jobs to RAM, and stop them until `resume`.",
    "wait": "Wait until jobs have finished.",
    "why": "Explain why a job has not started.",
}

SERVICE_VERBS = {
    "backup": "Write a backup of the queue to a file, also while it runs.",
    "clean": "Delete old finished jobs, and logs beyond the limits.",
    "daemon": "Start, stop, restart or inspect the daemon that runs the queue.",
    "drain": "Let running jobs finish, and start no new ones.",
    "estimates": "List, delete, export or import learned estimates of memory and time.",
    "export": "Write a script that submits waiting jobs to Slurm or Ray.",
    "notify": "Send a test notification.",
    "pause": "Start no new jobs; running jobs continue.",
    "report": "Sum up a week: GPU-hours, waits, unused memory and failures, with a chart.",
    "restore": "Replace the queue by a backup.",
    "summary": "Sum up a night: what succeeded, what failed and why, and what it cost.",
    "unpause": "Let jobs start again after `pause` or `drain`.",
    "web": "Open the queue's web page, and print its address.",
}

RECIPES = {
    "batch": "Run a command many times, within limits on CPU, RAM and GPU.",
    "datagen": "Generate data with a simulator, run after run, within the same limits as `batch`.",
    "render": "Render a manifest, with scenes and actors cached in VRAM and RAM within a budget.",
    "workspace": "Run a folder of configs on the GPUs, in tmux sessions.",
}

MACHINE_VERBS = {
    "completion": "Print the completion script for your shell.",
    "devices": "Show every GPU and the host, and their load.",
    "doctor": "Check which probes and engines work, and say how to fix those that do not.",
    "leases": "Show who holds GPUs, who waits, and which processes use them without a lease.",
    "run": "Run a program on its own GPUs as soon as they are free.",
    "sim-job": "Use a simulated GPU for a while, as a job would.",
    "simulate": "Compare policies on a trace of jobs, in simulated time.",
    "top": "Watch the GPUs and the queue live, and act on jobs with a key.",
    "uninstall": "List all files of your gpuyard, and remove them.",
    "watch": "Show the GPUs and the host live, and log them.",
}

# What people type every day, in the order of a job's life; the help folds all others.
EVERYDAY = ("submit", "queue", "logs", "show", "why", "cancel", "retry", "wait", "top", "web")

# The verbs of each package below `gpuyard.ui.cli`, and the modules that do not have the name of their verb.
PACKAGES = {"jobs": JOB_VERBS, "service": SERVICE_VERBS, "recipes": RECIPES, "machine": MACHINE_VERBS}
_MODULES = {
    **dict.fromkeys(("cancel", "hold", "priority", "release", "resume", "retry", "suspend"), "jobs.change_verbs"),
    "edit": "jobs.resubmit",
    **dict.fromkeys(("history", "why"), "jobs.explain"),
    **dict.fromkeys(("drain", "pause", "unpause"), "service.pause_verbs"),
    **dict.fromkeys(("clean", "restore"), "service.backup"),
    "summary": "service.report",
    "top": "machine.watch",
    "completion": "complete",
}
VERBS = {verb: text for verbs in PACKAGES.values() for verb, text in verbs.items()}


def import_verb(verb: str) -> "Command":
    """Return a verb and what runs it: an entry in the COMMANDS of its module, or the module."""
    package = next(name for name, verbs in PACKAGES.items() if verb in verbs)
    own = f"{package}.{verb.replace('-', '_')}"
    name = f"gpuyard.ui.cli.{_MODULES.get(verb, own)}"
    __import__(name)  # not by importlib, which takes as long as ten modules of ours
    module: Any = sys.modules[name]
    command: Command = getattr(module, "COMMANDS", {}).get(verb, module)
    return command


def main() -> None:
    arguments = sys.argv[1:]
    for name in ("stdout", "stderr"):  # send output to /dev/null where the process was started without them
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, open(null, "w", encoding="utf-8", closefd=False))  # noqa: SIM115 - open until exit
    try:
        status = _run_where_queue_is(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except GpuyardError as error:
        hint = f"\n  {error.hint}" if error.hint else ""
        _print_error(f"{error}{hint}")
        # `--json` of the command line, and not of the program behind `--`.
        if "--json" in (arguments[: arguments.index("--")] if "--" in arguments else arguments):
            from gpuyard.ui.cli.terminal import say_json

            say_json({"error": {"code": error.code, "message": str(error), "hint": error.hint}})
        default = EXIT_USAGE if isinstance(error, UserError) else EXIT_FAULT
        sys.exit(_EXIT_STATUSES.get(error.code, default))
    except OSError as error:  # a failed write: disk full, reader gone
        if not isinstance(error, BrokenPipeError):
            _print_error(error.strerror or str(error))
        # Python's flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAULT)
    # Exit without taking the interpreter down, which takes a fifth of a short command's time. If a module may have
    # threads, or functions that are to be called at the exit, then exit as usual.
    if {"atexit", "threading"}.isdisjoint(sys.modules):
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _run_where_queue_is(arguments: list[str]) -> int:
    try:
        return _run(arguments)
    except GpuyardError as error:
        if error.code == "elsewhere":
            from gpuyard.ui.cli.run_over_ssh import pass_on

            pass_on(error, arguments)
        raise


def _run(arguments: list[str]) -> int:
    name = arguments[0] if arguments else ""
    if name in VERBS:
        if name in JOB_VERBS:
            gc.set_threshold(20_000)  # new objects; most commands make fewer, and end
        from gpuyard.ui.cli.command_grammar import run_verb

        return run_verb(name, import_verb(name), arguments[1:])
    if not arguments and "_GPUYARD_COMPLETE" in os.environ:
        from gpuyard.ui.cli.complete import answer_shell

        sys.stdout.write(answer_shell(os.environ["_GPUYARD_COMPLETE"]))
        return 0
    if not arguments and sys.stdout.isatty():
        from gpuyard.ui.cli.help_and_overview import show_overview

        return show_overview()
    from gpuyard.ui.cli.help_and_overview import run_without_verb

    return run_without_verb(arguments)


def _print_error(text: str) -> None:
    from gpuyard.model.printable_text import printable_lines

    sys.stderr.write(f"gpuyard: {printable_lines(text)}\n")
    sys.stderr.flush()
