"""The verbs with what the help says about each, where their modules are, and the exit statuses."""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpuyard.ui.cli.command_grammar import Command

EXIT_FAULT, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
EXIT_NOT_FOUND, EXIT_IMPOSSIBLE, EXIT_JOB_FAILED, EXIT_JOB_CANCELLED, EXIT_TIMED_OUT = 3, 4, 5, 6, 124
EXIT_STUCK = 7

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
