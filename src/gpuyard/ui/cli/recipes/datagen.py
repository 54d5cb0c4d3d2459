"""`gpuyard datagen`: a batch of runs of a simulator that generates data."""

import csv
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, ValidationError, convert, to_builtins

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.model.option import Option
from gpuyard.model.units import format_count
from gpuyard.ui.cli.command_grammar import Arguments, Typed, Verb
from gpuyard.ui.cli.recipes.batch import batch_options, make_plan, run_batch
from gpuyard.ui.cli.terminal import absolute, say, say_json

VERB = Verb(
    """Generate data with a simulator, run after run, within limits on CPU, RAM and GPU.

    A run is PROGRAM --mode datagen --headless --prune-empty --prune-output-root DIR --output-root DIR --seed S
    --max-frames F, and the arguments after `--`; --dry-run prints all commands. The runs are jobs of the queue and
    continue when this terminal is closed. The output root of a run is its own folder, DIR/run-000017.

    \b
    gpuyard datagen --count 400 --concurrency 6 --max-gpu 80 --max-gpu-mem-mb 8000
    gpuyard datagen --count 400 --program ./sim --prune-with scheduler --frames '*.png' -- --scene city

    Exit status 0 if all runs succeeded, else 1.
    """,
    (
        *batch_options(stagger="2s", name="datagen"),
        Option("program", "text", "PROGRAM", "The simulator, or its path.", default="sim_view"),
        Option("output-root", "text", "DIR", "Directory with a folder per run.", default="out"),
        Option("prune", "flag", None, "Move runs without a frame away.", note="default"),
        Option("no-prune", "flag", None, "Leave runs without a frame where they are."),
        Option(
            "prune-output-root", "text", "DIR", "Directory for those runs.",
            note="the output root with -pruned appended",
        ),
        Option("prune-with", "choice", "[program|scheduler]",
               "What moves them: the simulator itself, or gpuyard at the end.",
               choices=("program", "scheduler"), default="program"),
        Option("prune-keeps", "choice", "[here|there]",
               "With --prune-with program: the simulator leaves runs with data in the output root (here), or moves "
               "them to the prune root (there).", choices=("here", "there"), note="detected"),
        Option("frames", "text", "GLOB", "With --prune-with scheduler: files that count as frames.", note="*"),
        Option("max-frames", "whole", "F", "Maximum number of frames per run.", least=1,
               note="the simulator's default"),
        Option("headless", "flag", None, "Without a window.", note="default"),
        Option("no-headless", "flag", None, "With a window."),
        Option("calibrate", "text", "FILE", "Print limits to use, by a log of `gpuyard watch --log`; no run."),
    ),
    Arguments("[-- ARGS...]", is_program=True),
)  # fmt: skip


def run(typed: Typed) -> int:
    values = typed.values()
    if values["calibrate"] is not None:
        return _calibrate(Path(values["calibrate"]), as_json=typed.flag("json"))
    for name in ("prune", "headless"):
        if typed.flag(name) and typed.flag(f"no-{name}"):
            raise UserError(f"--{name} and --no-{name} do not go together", hint="leave out one of them")
    prunes = None if typed.flag("no-prune") else values["prune-with"]
    if values["frames"] is not None and prunes != "scheduler":
        raise UserError("--frames needs --prune-with scheduler", hint="add --prune-with scheduler")
    if values["prune-keeps"] is not None and prunes != "program":
        raise UserError("--prune-keeps needs --prune-with program", hint="leave it out, or the other option")
    root = absolute(values["output-root"])
    plan = make_plan(
        typed,
        name=values["name"] or "datagen",
        command=_command(typed, prunes_itself=prunes == "program"),
        root=root,
        prunes=prunes,
        prune_keeps=values["prune-keeps"],
        pruned_root=None if prunes is None else absolute(values["prune-output-root"] or f"{root}-pruned"),
    )
    return run_batch(plan, typed)


def _command(typed: Typed, *, prunes_itself: bool) -> tuple[str, ...]:
    program = typed.values()["program"]
    if not program or program.startswith("-"):
        raise UserError(f"--program '{program}' is not a program", hint="name your simulator, or its path")
    headless = () if typed.flag("no-headless") else ("--headless",)
    prune = ("--prune-empty", "--prune-output-root", "{prune_root}") if prunes_itself else ()
    most = typed.text("max-frames")
    frames = ("--max-frames", most) if most else ()
    output = ("--output-root", "{output}", "--seed", "{seed}")
    return (program, "--mode", "datagen", *headless, *prune, *output, *frames, *typed.arguments)


_HINT = "give a file that `gpuyard watch --log FILE` has written"


class _Figure(Struct, frozen=True):
    """What an option limits, and the figure's column in the log of `gpuyard watch` and in that of a batch. `sign`: -1
    for a limit from below."""

    option: str
    kind: str
    what: str
    unit: str
    column: str
    batch_column: str
    sign: int = 1


_SMOOTHED = "utilization_smoothed_percent"
_FIGURES = (
    _Figure("--max-cpu", "host", "smoothed CPU use", "%", _SMOOTHED, "cpu_smoothed_percent"),
    _Figure("--min-free-mem-mb", "host", "available RAM", " MB", "memory_free_mb", "memory_available_mb", -1),
    _Figure("--max-gpu", "device", "smoothed use", "%", _SMOOTHED, "gpu_smoothed_percent"),
    _Figure("--max-gpu-mem-mb", "device", "memory in use", " MB", "memory_used_mb", "gpu_memory_used_mb"),
)


class ProposedLimit(Struct, frozen=True, kw_only=True):
    """`value` is None if the log does not have the figure."""

    option: str
    value: int | None
    why: str


def read_sample_log(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text().splitlines()
        if lines and lines[0].startswith("{"):
            return convert(list(map(json.loads, lines)), list[dict[str, Any]])
        return list(csv.DictReader(lines))
    except OSError as error:
        raise EnvironmentFault(f"cannot read '{path}': {error.strerror}", hint=_HINT) from error
    except ValueError as error:
        raise UserError(f"'{path}' is not a log of samples: {error}", hint=_HINT) from error


def propose_limits(rows: Iterable[Mapping[str, Any]]) -> list[ProposedLimit]:
    """Return limits within which the machine was in 95% of the samples of a log, of `gpuyard watch --log` or of a
    batch's `--sample-log`. Of several GPUs, the busiest one decides."""
    values: dict[str, dict[str, list[float]]] = {figure.option: defaultdict(list) for figure in _FIGURES}
    for row in rows:
        is_of_batch = "event" in row  # a row of a batch has figures of the host and of a device
        for figure in _FIGURES:
            text = row.get(figure.batch_column if is_of_batch else figure.column)
            if text not in (None, "") and (is_of_batch or row.get("kind") == figure.kind):
                device = "" if figure.kind == "host" else str(row.get("device") or row.get("id"))
                try:
                    values[figure.option][device].append(convert(text, float, strict=False))
                except ValidationError as error:
                    raise UserError(f"the log has '{text}' for a number", hint=_HINT) from error
    if not any(values.values()):
        raise UserError("the log has no samples of CPU, RAM or GPUs", hint=_HINT)
    return [_propose(figure, values[figure.option]) for figure in _FIGURES]


def _propose(figure: _Figure, values: Mapping[str, list[float]]) -> ProposedLimit:
    if not values:
        return ProposedLimit(option=figure.option, value=None, why=f"no {figure.option}: its figure is not in the log")
    # Each device's smallest value that 95% of its values do not exceed.
    signed = {device: sorted(figure.sign * each for each in found) for device, found in values.items()}
    bounds = {device: found[math.ceil(0.95 * len(found)) - 1] for device, found in signed.items()}
    device = max(bounds, key=lambda each: bounds[each])
    bound = figure.sign * bounds[device]
    where = f" of GPU {device}" + (", the highest" if len(values) > 1 else "") if device else ""
    why = (
        f"{figure.what}{where}: {bound:.1f}{figure.unit} or {'less' if figure.sign > 0 else 'more'}"
        f" in 95% of {format_count(len(values[device]), 'sample')}"
    )
    value = math.ceil(bound) if figure.sign > 0 else math.floor(bound)
    return ProposedLimit(option=figure.option, value=value, why=why)


def _calibrate(log: Path, *, as_json: bool) -> int:
    limits = propose_limits(read_sample_log(log))
    if as_json:
        say_json(to_builtins(limits))
        return 0
    options = ["" if limit.value is None else f"{limit.option} {limit.value}" for limit in limits]
    width = max(map(len, options))
    say(*(f"{option:{width}}  # {limit.why}" for option, limit in zip(options, limits, strict=True)))
    return 0
