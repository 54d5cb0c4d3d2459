"""The options that `gpuyard batch` and `gpuyard datagen` share.

Values stay text, which the queue parses; invalid values are rejected here, before anything is created or started.
"""

import math
import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from msgspec import Struct

from gpuyard.core.job.submit_options import SUBMIT_OPTIONS
from gpuyard.core.units import parse_duration, parse_size
from gpuyard.errors import UserError
from gpuyard.recipes.batch.plan import BatchPlan
from gpuyard.recipes.batch.prune_empty_runs import ANY_FILE
from gpuyard.recipes.batch.start_or_continue import ExistingBatch
from gpuyard.ui.cli.rich_output import absolute, json_option

F = TypeVar("F", bound=Callable[..., Any])
Check = Callable[[str, str], object]

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


def batch_options(*, stagger: str, name: str) -> Callable[[F], F]:
    """Return a decorator that adds all shared options; each command has its own options for output."""
    options = [
        option("count", "N", whole(1), "Number of runs.", default=None),
        option("concurrency", "K", whole(1), "Run at most K at once.", default="1"),
        option("max-cpu", "P", _percent, "Start only at up to P percent CPU use.", default="85"),
        option("min-free-mem-mb", "M", None, "Start only with at least M MB of RAM available.", default="2048"),
        option("min-free-disk", "SIZE", None, "Start only with this much free on the output's disk. [1G]"),
        option("max-gpu", "P", _percent, "Only GPUs at up to P percent use."),
        option("max-gpu-mem-mb", "M", None, "Only GPUs with up to M MB of memory used."),
        option("run-vram", "SIZE", _size, "GPU memory of a run, such as 2G. [learned]"),
        option("run-ram", "SIZE", _size, "RAM of a run, such as 4G. [learned]"),
        option("gpus", "N", whole(0), "GPUs of each run. [1; 0 on a machine without GPUs]"),
        option("device", "LIST", _list, "Only these GPUs, such as 0,2, amd:0 or a GPU's id. [all]"),
        option("vendor", "NAME", _vendor, "Only GPUs of this vendor, such as amd. [that of the largest GPU]"),
        option("stagger", "TIME", None, "Minimum time between starts.", default=stagger),
        option("smoothing", "TIME", None, "Average load and memory over this time.", default="5s"),
        option("steady", "TIME", None, "Time within a limit before runs start again.", default="3s"),
        option("retries", "N", whole(0), "Retry a failed run up to N times, with its seed.", default="0"),
        option("time-limit", "TIME", _positive_time, "Stop a run after this time, such as 2h."),
        option("priority", "N", whole(-1_000_000), "Higher starts earlier than other jobs of the queue.", default="0"),
        option("seed", "S", whole(None), "Run i gets the seed S + i.", default="0"),
        option("name", "WORD", _word, f"Name in the queue. [{name}]"),
        option("sample-log", "FILE", _log, "Log the load that runs waited for to this .csv or .jsonl file."),
        click.option("--resume", is_flag=True, help="Continue the batch in the output root; fail if there is none."),
        click.option("--append", is_flag=True, help="Add runs with the next seeds to the batch in the output root."),
        click.option("--detach", is_flag=True, help="Print the job ids and return at once."),
        click.option("--dry-run", is_flag=True, help="Print the commands without running them."),
        json_option,
    ]

    def decorate(function: F) -> F:
        for each in reversed(options):
            function = each(function)
        return function

    return decorate


def run_mode(typed: dict[str, Any]) -> RunMode:
    if typed["resume"] and typed["append"]:
        raise UserError("--resume and --append exclude each other", hint="finish the batch first, then add runs to it")
    existing = (
        ExistingBatch.RESUME if typed["resume"] else ExistingBatch.APPEND if typed["append"] else ExistingBatch.AGAIN
    )
    root = typed["output_root"]
    if existing is not ExistingBatch.AGAIN and root is None:
        raise UserError(f"--{existing.name.lower()}: which batch?", hint="name its folder with --output-root")
    source = click.get_current_context().get_parameter_source("output_root")
    return RunMode(
        existing=existing,
        is_detached=typed["detach"],
        is_dry=typed["dry_run"],
        as_json=typed["as_json"],
        root=None if root is None else absolute(root),
        is_root_typed=source is ParameterSource.COMMANDLINE,
    )


def make_plan(typed: dict[str, Any], **own: Any) -> BatchPlan:
    """Return the plan. `own` are its fields that the commands determine each in their own way."""
    if typed["count"] is None:
        raise UserError("how many runs?", hint="give --count, such as --count 400")
    frames = typed["frames"] or ANY_FILE
    count, seed = int(typed["count"]), int(typed["seed"])
    return BatchPlan(count=count, seed=seed, frames=frames, options=_queue_options(typed), **own)


def _queue_options(typed: dict[str, Any]) -> dict[str, str]:
    """Return the options of the submission. The daemon has another working directory, so paths are absolute."""
    given = {name.replace("-", "_"): name for name in SUBMIT_OPTIONS if name not in _OF_PLAN} | {"run_vram": "vram"}
    options = {name: typed[ours] for ours, name in given.items() if typed.get(ours) is not None}
    if "sample-log" in options:
        options["sample-log"] = absolute(options["sample-log"])
    return options


def to_name(program: str) -> str:
    """Return the program's name with only characters that are safe in a folder name."""
    return re.sub(r"[^\w.+-]+", "-", os.path.basename(program))[:_LONGEST_NAME].strip("-") or "batch"


def option(name: str, metavar: str, check: Check | None, text: str, default: str | None = None) -> Callable[[F], F]:
    """Return an option with a check of its own; the queue's own parser checks all of them later."""

    def checked(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
        if value is not None and check is not None:
            check(f"--{name}", value)
        return value

    return click.option(
        f"--{name}", default=default, show_default=default is not None, callback=checked, metavar=metavar, help=text
    )


def texts_option(name: str) -> Callable[[F], F]:
    """Return an option of `gpuyard submit` that may be repeated."""
    known = SUBMIT_OPTIONS[name]
    return click.option(
        f"--{name}", multiple=True, callback=lambda _, __, values: list(values) or None, metavar=known.metavar,
        help=known.help,
    )  # fmt: skip


# Checks of a value; each gets the name of its option for the message


def whole(least: int | None) -> Check:
    def check(name: str, text: str) -> None:
        if not re.fullmatch(r"[+-]?\d{1,18}", text, re.ASCII):
            raise UserError(f"{name} takes a whole number, not '{text}'", hint=f"write it as {name} {least or 7}")
        if least is not None and int(text) < least:
            raise UserError(f"{name} {text} is too small", hint=f"give {least} or more")

    return check


def _percent(name: str, text: str) -> None:
    try:
        is_percentage = 0 <= float(text) <= 100
    except ValueError:
        raise UserError(f"{name} takes a number, not '{text}'", hint=f"write it as {name} 80") from None
    if not is_percentage:
        raise UserError(f"{name} {text} is not a percentage", hint="give 0 to 100")


def _size(name: str, text: str) -> None:
    if not 0 < parse_size(text) < math.inf:
        raise UserError(f"{name} is 0", hint="give at least 1M, or leave it out: it is learned")


def _positive_time(name: str, text: str) -> None:
    if parse_duration(text) == 0:
        raise UserError(f"{name} is 0", hint="write it as 30s, 10m or 4h")


def _list(name: str, text: str) -> None:
    if not any(map(str.strip, text.split(","))):
        raise UserError(f"{name} names no GPU", hint="write it as 0,2 or leave it out")


def _vendor(name: str, text: str) -> None:
    known = SUBMIT_OPTIONS["vendor"].choices
    if text not in known:
        raise UserError(f"{name} '{text}' is no vendor of GPUs", hint=f"give one of {', '.join(known)}")


def _word(name: str, text: str) -> None:
    if text != to_name(text):
        raise UserError(
            f"{name} '{text}' is not one plain word", hint=f"letters, digits, . _ + and -, at most {_LONGEST_NAME}"
        )


def _log(name: str, text: str) -> None:
    if not text.endswith((".csv", ".jsonl")):
        raise UserError(f"{name}: cannot log to '{text}'", hint="name a file that ends in .csv or .jsonl")
