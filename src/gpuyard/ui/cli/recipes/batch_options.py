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

from gpuyard.core.units import parse_duration, parse_size
from gpuyard.errors import UserError
from gpuyard.recipes.batch.start_or_continue import ExistingBatch
from gpuyard.ui.cli.recipes.absolute_path import absolute
from gpuyard.ui.cli.rich_output import json_option

F = TypeVar("F", bound=Callable[..., Any])
Check = Callable[[str, str], object]

# Parameter names of these commands, and the options of a submission.
_QUEUE_OPTIONS = {
    "concurrency": "concurrency",
    "max_cpu": "max-cpu",
    "min_free_mem_mb": "min-free-mem-mb",
    "max_gpu": "max-gpu",
    "max_gpu_mem_mb": "max-gpu-mem-mb",
    "run_vram": "vram",
    "run_ram": "run-ram",
    "gpus": "gpus",
    "device": "device",
    "stagger": "stagger",
    "smoothing": "smoothing",
    "steady": "steady",
    "retries": "retries",
    "time_limit": "time-limit",
    "priority": "priority",
}
_LONGEST_NAME = 60


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
        _option("count", "N", _whole(1), "Number of runs.", default=None),
        _option("concurrency", "K", _whole(1), "Run at most K at once.", default="1"),
        _option("max-cpu", "P", _percent, "Start only at up to P percent CPU use.", default="85"),
        _option("min-free-mem-mb", "M", _amount, "Start only with at least M MB of RAM available.", default="2048"),
        _option("max-gpu", "P", _percent, "Only GPUs at up to P percent use."),
        _option("max-gpu-mem-mb", "M", _amount, "Only GPUs with up to M MB of memory used."),
        _option("run-vram", "SIZE", _size, "GPU memory of a run, such as 2G. [learned]"),
        _option("run-ram", "SIZE", _size, "RAM of a run, such as 4G. [learned]"),
        _option("gpus", "N", _whole(0), "GPUs of each run. [1; 0 on a machine without GPUs]"),
        _option("device", "LIST", _list, "Only these GPUs, such as 0,2 or a GPU's id. [all]"),
        _option("stagger", "TIME", _time, "Minimum time between starts.", default=stagger),
        _option("smoothing", "TIME", _time, "Average load and memory over this time.", default="5s"),
        _option("steady", "TIME", _time, "Time within a limit before runs start again.", default="3s"),
        _option("retries", "N", _whole(0), "Retry a failed run up to N times, with its seed.", default="0"),
        _option("time-limit", "TIME", _positive_time, "Stop a run after this time, such as 2h."),
        _option(
            "priority", "N", _whole(-1_000_000), "Higher starts earlier than other jobs of the queue.", default="0"
        ),
        _option("seed", "S", _whole(None), "Run i gets the seed S + i.", default="0"),
        _option("name", "WORD", _word, f"Name in the queue. [{name}]"),
        _option("sample-log", "FILE", _log, "Log the load that runs waited for to this .csv or .jsonl file."),
        click.option("--resume", is_flag=True, help="Continue the batch in the output root; fail if there is none."),
        click.option("--append", is_flag=True, help="Add runs with the next seeds to the batch in the output root."),
        click.option("--detach", is_flag=True, help="Print the job ids and return at once."),
        click.option("--dry-run", is_flag=True, help="Print the commands without running them."),
        json_option,
    ]

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
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


def queue_options(typed: dict[str, Any]) -> dict[str, str]:
    """Return the options of the submission. The daemon has another working directory, so paths are absolute."""
    options = {name: typed[ours] for ours, name in _QUEUE_OPTIONS.items() if typed[ours] is not None}
    if typed["sample_log"] is not None:
        options["sample-log"] = absolute(typed["sample_log"])
    return options


def count_of(typed: dict[str, Any]) -> int:
    if typed["count"] is None:
        raise UserError("how many runs?", hint="give --count, such as --count 400")
    return int(typed["count"])


def to_name(program: str) -> str:
    """Return the program's name with only characters that are safe in a folder name."""
    return re.sub(r"[^\w.+-]+", "-", os.path.basename(program))[:_LONGEST_NAME].strip("-") or "batch"


def _option(name: str, metavar: str, check: Check, text: str, default: str | None = None) -> Callable[[F], F]:
    def checked(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
        if value is not None:
            check(f"--{name}", value)
        return value

    return click.option(
        f"--{name}", default=default, show_default=default is not None, callback=checked, metavar=metavar, help=text
    )


def whole_option(name: str, metavar: str, least: int, text: str) -> Callable[[F], F]:
    return _option(name, metavar, _whole(least), text)


# Checks of a value; each gets the name of its option for the message


def _whole(least: int | None) -> Check:
    def check(name: str, text: str) -> None:
        if not re.fullmatch(r"[+-]?\d{1,18}", text, re.ASCII):
            raise UserError(f"{name} takes a whole number, not '{text}'", hint=f"write it as {name} {least or 7}")
        if least is not None and int(text) < least:
            raise UserError(f"{name} {text} is too small", hint=f"give {least} or more")

    return check


def _percent(name: str, text: str) -> None:
    if not 0 <= _number(name, text) <= 100:
        raise UserError(f"{name} {text} is not a percentage", hint="give 0 to 100")


def _amount(name: str, text: str) -> None:
    if not 0 <= _number(name, text) < math.inf:
        raise UserError(f"{name} {text} is out of range", hint="give MB, 0 or more")


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{name} takes a number, not '{text}'", hint=f"write it as {name} 80") from None


def _size(name: str, text: str) -> None:
    if not 0 < parse_size(text) < math.inf:
        raise UserError(f"{name} is 0", hint="give at least 1M, or leave it out: it is learned")


def _time(_: str, text: str) -> None:
    parse_duration(text)


def _positive_time(name: str, text: str) -> None:
    if parse_duration(text) == 0:
        raise UserError(f"{name} is 0", hint="write it as 30s, 10m or 4h")


def _list(name: str, text: str) -> None:
    if not any(map(str.strip, text.split(","))):
        raise UserError(f"{name} names no GPU", hint="write it as 0,2 or leave it out")


def _word(name: str, text: str) -> None:
    if text != to_name(text):
        raise UserError(
            f"{name} '{text}' is not one plain word", hint=f"letters, digits, . _ + and -, at most {_LONGEST_NAME}"
        )


def _log(name: str, text: str) -> None:
    if not text.endswith((".csv", ".jsonl")):
        raise UserError(f"{name}: cannot log to '{text}'", hint="name a file that ends in .csv or .jsonl")
