"""The options that `gpuyard batch` and `gpuyard datagen` share.

Values stay text, which the queue parses (`check_options` in `batch`); what the queue does not know is checked here.
"""

import os
import re
from typing import Any

from msgspec import Struct

from gpuyard.errors import UserError
from gpuyard.model.option import Option
from gpuyard.model.submit_options import SUBMIT_OPTIONS
from gpuyard.recipes.batch.plan import BatchPlan
from gpuyard.recipes.batch.prune_empty_runs import ANY_FILE
from gpuyard.recipes.batch.start_or_continue import ExistingBatch
from gpuyard.ui.cli.command_grammar import JSON, Typed
from gpuyard.ui.cli.terminal import absolute

_LONGEST_NAME = 60
# Options of the submission that follow from the plan, or that have another meaning in a batch.
_OF_PLAN = ("name", "output-root", "seed")


class RunMode(Struct, frozen=True, kw_only=True):
    """How a batch is started and followed. `root` is the output root that the command names, None for a new one each
    time; `is_root_typed` is False if it is the default."""

    existing: ExistingBatch
    is_detached: bool
    is_dry: bool
    as_json: bool
    root: str | None
    is_root_typed: bool


def batch_options(*, stagger: str, name: str) -> tuple[Option, ...]:
    known = SUBMIT_OPTIONS
    return (
        Option("count", "whole", "N", "Number of runs.", least=1),
        known["concurrency"].but(metavar="K", help="Run at most K at once.", default="1"),
        known["max-cpu"].but(default="85"),
        known["min-free-mem-mb"].but(default="2048"),
        known["min-free-disk"].but(help="Start only with this much free on the output's disk.", note="1G"),
        known["max-gpu"],
        known["max-gpu-mem-mb"],
        known["vram"].but(name="run-vram", help="GPU memory of a run, such as 2G.", note="learned"),
        known["run-ram"].but(help="RAM of a run, such as 4G.", note="learned"),
        known["gpus"].but(help="GPUs of each run.", note="1; 0 on a machine without GPUs", default=None),
        known["device"],
        known["vendor"],
        known["stagger"].but(help="Minimum time between starts.", default=stagger),
        known["smoothing"].but(help="Average load and memory over this time."),
        known["steady"].but(help="Time within a limit before runs start again."),
        known["retries"].but(help="Retry a failed run up to N times, with its seed."),
        known["time-limit"].but(help="Stop a run after this time, such as 2h."),
        known["priority"].but(help="Higher starts earlier than other jobs of the queue.", note=None, default="0"),
        Option("seed", "whole", "S", "Run i gets the seed S + i.", default="0"),
        Option("name", "text", "WORD", "Name in the queue.", note=name),
        known["sample-log"].but(help="Log the load that runs waited for to this .csv or .jsonl file."),
        Option("resume", "flag", None, "Continue the batch in the output root; fail if there is none."),
        Option("append", "flag", None, "Add runs with the next seeds to the batch in the output root."),
        Option("detach", "flag", None, "Print the job ids and return at once."),
        Option("dry-run", "flag", None, "Print the commands without running them."),
        JSON,
    )


def run_mode(typed: Typed, root: str | None) -> RunMode:
    """`root` is the output root, None for a new one each time."""
    if typed.flag("resume") and typed.flag("append"):
        raise UserError("--resume and --append exclude each other", hint="finish the batch first, then add runs to it")
    is_continued = {ExistingBatch.RESUME: typed.flag("resume"), ExistingBatch.APPEND: typed.flag("append")}
    existing = next((each for each, is_typed in is_continued.items() if is_typed), ExistingBatch.AGAIN)
    if existing is not ExistingBatch.AGAIN and root is None:
        raise UserError(f"--{existing.name.lower()}: which batch?", hint="name its folder with --output-root")
    return RunMode(
        existing=existing,
        is_detached=typed.flag("detach"),
        is_dry=typed.flag("dry-run"),
        as_json=typed.flag("json"),
        root=None if root is None else absolute(root),
        is_root_typed="output-root" in typed.options,
    )


def make_plan(typed: Typed, **own: Any) -> BatchPlan:
    values = typed.values()
    if values["count"] is None:
        raise UserError("how many runs?", hint="give --count, such as --count 400")
    _check(typed)
    frames = typed.text("frames") or ANY_FILE
    return BatchPlan(count=values["count"], seed=values["seed"], frames=frames, options=_queue_options(typed), **own)


def _check(typed: Typed) -> None:
    name, log, devices = typed.text("name"), typed.text("sample-log"), typed.text("device")
    if name is not None and name != to_name(name):
        hint = f"letters, digits, . _ + and -, at most {_LONGEST_NAME}"
        raise UserError(f"--name '{name}' is not one plain word", hint=hint)
    if log is not None and not log.endswith((".csv", ".jsonl")):
        raise UserError(f"--sample-log: cannot log to '{log}'", hint="name a file that ends in .csv or .jsonl")
    if devices is not None and not any(map(str.strip, devices.split(","))):
        raise UserError("--device names no GPU", hint="write it as 0,2 or leave it out")


def _queue_options(typed: Typed) -> dict[str, Any]:
    """Return the options of the submission. The daemon has another working directory, so paths are absolute."""
    names = {name: name for name in SUBMIT_OPTIONS if name not in _OF_PLAN} | {"run-vram": "vram"}
    given = {option.name: typed.options.get(option.name, option.default) for option in typed.verbs[-1].options}
    options = {names[name]: value for name, value in given.items() if name in names and value is not None}
    if log := typed.text("sample-log"):
        options["sample-log"] = absolute(log)
    return options


def to_name(program: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", os.path.basename(program))[:_LONGEST_NAME].strip("-") or "batch"
