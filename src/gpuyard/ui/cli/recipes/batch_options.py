"""The options that `gpuyard batch` and `gpuyard datagen` share, and what they come to: a plan and how to conduct it.

Values stay as they were typed, which is how the queue reads them; what cannot be one is told here, before anything is
made or started.
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
from gpuyard.ui.cli.rich_output import json_option

F = TypeVar("F", bound=Callable[..., Any])
Check = Callable[[str, str], object]

# As the queue calls them, by the parameters of ours.
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


class Conduct(Struct, frozen=True, kw_only=True):
    """How a batch is begun and followed. `root` is the output root that the command names, None where it is a new one
    each time; `is_root_typed` says whether that is one of its words."""

    way: ExistingBatch
    is_detached: bool
    is_dry: bool
    as_json: bool
    root: str | None
    is_root_typed: bool


def batch_options(*, stagger: str, name: str) -> Callable[[F], F]:
    """All but those for its output, which the two commands have in their own words."""
    options = [
        _option("count", "N", _whole(1), "How many runs.", default=None),
        _option("concurrency", "K", _whole(1), "At most so many at once.", default="1"),
        _option("max-cpu", "P", _percent, "Launch at no more than P percent CPU use.", default="85"),
        _option("min-free-mem-mb", "M", _amount, "Launch with at least M MB of RAM available.", default="2048"),
        _option("max-gpu", "P", _percent, "Launch only on GPUs at no more than P percent use."),
        _option("max-gpu-mem-mb", "M", _amount, "Launch only on GPUs with at most M MB of memory used."),
        _option("run-vram", "SIZE", _size, "What a run takes of a GPU, such as 2G. [learned]"),
        _option("run-ram", "SIZE", _size, "What a run takes of RAM, such as 4G. [learned]"),
        _option("gpus", "N", _whole(0), "GPUs of each run. [1; none where the machine has none]"),
        _option("device", "LIST", _list, "Only these GPUs, such as 0,2 or a GPU's id. [all]"),
        _option("stagger", "TIME", _time, "The least time from one launch to the next.", default=stagger),
        _option("smoothing", "TIME", _time, "Figures are averaged over about this long.", default="5s"),
        _option("steady", "TIME", _time, "How long a figure must be within its bound again.", default="3s"),
        _option("retries", "N", _whole(0), "Try a failed run again so often, with its seed.", default="0"),
        _option("time-limit", "TIME", _positive_time, "End a run after this long, such as 2h."),
        _option(
            "priority", "N", _whole(-1_000_000), "Higher starts earlier than other jobs of the queue.", default="0"
        ),
        _option("seed", "S", _whole(None), "Run i gets the seed S + i.", default="0"),
        _option("name", "WORD", _word, f"What the queue calls it. [{name}]"),
        _option("sample-log", "FILE", _log, "Write what the gates saw to this file, .csv or .jsonl."),
        click.option("--resume", is_flag=True, help="Go on with the batch in the output root and with no other one."),
        click.option("--append", is_flag=True, help="Add runs with the next seeds to the batch in the output root."),
        click.option("--detach", is_flag=True, help="Print the jobs' ids, and leave it all to the queue."),
        click.option("--dry-run", is_flag=True, help="Print the commands that would be run, and run nothing."),
        json_option,
    ]

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def conduct_of(typed: dict[str, Any]) -> Conduct:
    if typed["resume"] and typed["append"]:
        raise UserError("--resume and --append do not go together", hint="finish the batch first, then add runs to it")
    way = ExistingBatch.RESUME if typed["resume"] else ExistingBatch.APPEND if typed["append"] else ExistingBatch.AGAIN
    root = typed["output_root"]
    if way is not ExistingBatch.AGAIN and root is None:
        raise UserError(f"--{way.name.lower()}: which batch?", hint="name its folder with --output-root")
    source = click.get_current_context().get_parameter_source("output_root")
    return Conduct(
        way=way,
        is_detached=typed["detach"],
        is_dry=typed["dry_run"],
        as_json=typed["as_json"],
        root=None if root is None else absolute(root),
        is_root_typed=source is ParameterSource.COMMANDLINE,
    )


def queue_options(typed: dict[str, Any]) -> dict[str, str]:
    """Those that were typed or have a default; the daemon works in another directory, so a file is named in full."""
    options = {name: typed[ours] for ours, name in _QUEUE_OPTIONS.items() if typed[ours] is not None}
    if typed["sample_log"] is not None:
        options["sample-log"] = absolute(typed["sample_log"])
    return options


def count_of(typed: dict[str, Any]) -> int:
    if typed["count"] is None:
        raise UserError("how many runs?", hint="say it with --count, such as --count 400")
    return int(typed["count"])


def word_of(program: str) -> str:
    """A program's name as one word, which can also be that of a folder."""
    return re.sub(r"[^\w.+-]+", "-", os.path.basename(program))[:_LONGEST_NAME].strip("-") or "batch"


def absolute(path: str) -> str:
    if not path:
        raise UserError("a path is empty", hint="name a folder, or leave the option out")
    try:
        return os.path.abspath(path)
    except FileNotFoundError:
        raise UserError("the current directory is no longer there", hint="go to another one") from None


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


# What a value has to be; each is told its option's name


def _whole(least: int | None) -> Check:
    def check(name: str, text: str) -> None:
        if not re.fullmatch(r"[+-]?\d{1,18}", text, re.ASCII):
            raise UserError(f"{name} takes a whole number, not '{text}'", hint=f"write it as {name} {least or 7}")
        if least is not None and int(text) < least:
            raise UserError(f"{name} {text} is too small", hint=f"give it {least} or more")

    return check


def _percent(name: str, text: str) -> None:
    if not 0 <= _number(name, text) <= 100:
        raise UserError(f"{name} {text} is not a percentage", hint="give it from 0 to 100")


def _amount(name: str, text: str) -> None:
    if not 0 <= _number(name, text) < math.inf:
        raise UserError(f"{name} {text} is out of range", hint="give it in MB, 0 or more")


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{name} takes a number, not '{text}'", hint=f"write it as {name} 80") from None


def _size(name: str, text: str) -> None:
    if not 0 < parse_size(text) < math.inf:
        raise UserError(f"{name} {text} is nothing", hint="give it at least 1M, or leave it out to have it learned")


def _time(_: str, text: str) -> None:
    parse_duration(text)


def _positive_time(name: str, text: str) -> None:
    if parse_duration(text) == 0:
        raise UserError(f"{name} is no time at all", hint="write it as 30s, 10m or 4h")


def _list(name: str, text: str) -> None:
    if not any(map(str.strip, text.split(","))):
        raise UserError(f"{name} names no GPU", hint="write it as 0,2 or leave it out")


def _word(name: str, text: str) -> None:
    if text != word_of(text):
        raise UserError(
            f"{name} '{text}' is not one plain word", hint=f"letters, digits, . _ + and -, at most {_LONGEST_NAME}"
        )


def _log(name: str, text: str) -> None:
    if not text.endswith((".csv", ".jsonl")):
        raise UserError(f"{name}: cannot log to '{text}'", hint="name a file that ends in .csv or .jsonl")
