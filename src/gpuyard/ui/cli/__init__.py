"""The command line: a file per verb, each imported only when it is used.

The queue's verbs are called in loops, so they are understood without click where that can be done (`fast`); everything
else, help and mistakes included, is click's (`group`).

Exit statuses: 0 it worked; 1 something on this machine stands in the way; 2 what was typed cannot be understood;
130 interrupted. Each message on standard error says what to try next.
"""

import importlib
import os
import sys

from gpuyard.errors import GpuyardError, UserError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from gpuyard.ui.cli.click_group import cli as cli

EXIT_FAULT, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

JOB_VERBS = {
    "cancel": "End jobs, or take them out of the queue.",
    "history": "Show what happened to a job, step by step.",
    "hold": "Keep waiting jobs from starting.",
    "logs": "Print what a job wrote, and follow it.",
    "priority": "Let waiting jobs start earlier or later.",
    "queue": "Show what runs, what waits and why, and what has finished.",
    "release": "Let held jobs start.",
    "resume": "Let suspended jobs go on.",
    "retry": "Queue finished jobs once more.",
    "show": "Show all about a job.",
    "submit": "Put a program into the queue; it runs when there is room for it.",
    "suspend": "Move the GPU memory of running jobs to RAM, and stop them until `resume`.",
    "wait": "Wait until jobs have finished.",
    "why": "Say why a job does not run yet.",
}

SERVICE_VERBS = {
    "clean": "Forget jobs that finished long ago, and their logs.",
    "daemon": "Start, stop, restart or look at the daemon that runs the queue.",
    "drain": "Let running jobs finish, and start nothing new.",
    "estimates": "List what was learned about programs, and forget it.",
    "export": "Write a script that submits waiting jobs to Slurm or Ray.",
    "notify": "Send a test notification, to see whether it arrives.",
    "pause": "Start nothing new; running jobs go on.",
    "report": "Sum up a week: GPU-hours, waits, waste and failures, in a picture.",
    "unpause": "Go on after `pause` or `drain`.",
    "web": "Open the queue's page, and print where it is.",
}

RECIPES = {
    "batch": "Run a command many times, each time when the machine has room for it.",
    "datagen": "Generate data with a simulator, run after run, as the machine has headroom.",
    "render": "Render a manifest, with scenes and actors kept in VRAM and RAM on a budget.",
    "workspace": "Run a folder of configs over the GPUs, in tmux sessions.",
}

MACHINE_VERBS = {
    "completion": "Print the script that completes commands in your shell.",
    "devices": "Show every GPU and the host, and how busy they are.",
    "doctor": "Say which probes work, which do not, and what to do about it.",
    "leases": "Show who holds which GPUs, who waits, and who uses them without a lease.",
    "run": "Run a program on GPUs of its own, as soon as they are free.",
    "sim-job": "Use a simulated GPU for a while, as a job would.",
    "simulate": "Compare policies on a trace of jobs, in simulated time.",
    "top": "Watch the GPUs and the queue live, and act on jobs with a key.",
    "uninstall": "List every place that holds files of your gpuyard, and remove them.",
    "watch": "Follow the GPUs and the host live, and log them.",
}

# The verbs of each package below `gpuyard.ui.cli`.
PACKAGES = {"jobs": JOB_VERBS, "service": SERVICE_VERBS, "recipes": RECIPES, "machine": MACHINE_VERBS}
QUEUE_VERBS = {**JOB_VERBS, **SERVICE_VERBS}
VERBS = {verb: text for verbs in PACKAGES.values() for verb, text in verbs.items()}
# Older names, which still work and are not in the help.
ALIASES = {"story": "history"}


def import_verb(verb: str) -> "Any":
    """Import the module of a verb; aliases are resolved by the caller."""
    package = next(name for name, verbs in PACKAGES.items() if verb in verbs)
    return importlib.import_module(f"gpuyard.ui.cli.{package}.{verb.replace('-', '_')}")


def __getattr__(name: str) -> "Any":
    """`cli`, the click group, is there for those who ask for it; making it takes longer than most commands run."""
    if name != "cli":
        raise AttributeError(f"module 'gpuyard.ui.cli' has no attribute '{name}'")
    from gpuyard.ui.cli.click_group import cli

    return cli


def main() -> None:
    """The `gpuyard` command."""
    _open_closed_streams()
    try:
        status = _run(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except GpuyardError as error:
        hint = f"\n  {error.hint}" if error.hint else ""
        _complain(f"{error}{hint}")
        sys.exit(EXIT_USAGE if isinstance(error, UserError) else EXIT_FAULT)
    except OSError as error:
        _give_up(error)
    sys.exit(status)


def _run(arguments: list[str]) -> int:
    name = ALIASES.get(arguments[0], arguments[0]) if arguments else ""
    if name in QUEUE_VERBS:
        from gpuyard.ui.cli.fast_parser import parse

        verb = import_verb(name)
        typed = parse(verb.VERB, arguments[1:])
        if typed is not None:
            status: int = verb.run(typed)
            return status
    from gpuyard.ui.cli.click_group import run_group

    return run_group()


def _open_closed_streams() -> None:
    """Somebody may have started us without an output; what we write to it is then lost, and that is all."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, open(nowhere, "w", encoding="utf-8", closefd=False))  # noqa: SIM115 - open to the end


def _complain(text: str) -> None:
    sys.stderr.write(f"gpuyard: {text}\n")
    sys.stderr.flush()


def _give_up(error: OSError) -> "NoReturn":
    """An output that is full or whose reader has gone. Python would complain again when it flushes at exit."""
    if not isinstance(error, BrokenPipeError):
        _complain(error.strerror or str(error))
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(EXIT_FAULT)
