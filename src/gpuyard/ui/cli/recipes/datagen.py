"""`gpuyard datagen`: a batch of runs of a simulator that generates data."""

from pathlib import Path
from typing import Any

import click
from msgspec import to_builtins

from gpuyard.errors import UserError
from gpuyard.ui.cli.recipes.batch import run_batch
from gpuyard.ui.cli.recipes.batch_options import batch_options, make_plan, option, run_mode, whole
from gpuyard.ui.cli.rich_output import absolute
from gpuyard.ui.cli.terminal import say, say_json

_NAME = "datagen"


@click.command("datagen", context_settings={"allow_interspersed_args": False})
@batch_options(stagger="2s", name=_NAME)
@click.option("--program", default="sim_view", show_default=True, metavar="PROGRAM", help="The simulator, or its path.")
@click.option("--output-root", default="out", show_default=True, metavar="DIR", help="Directory with a folder per run.")
@click.option(
    "--prune/--no-prune", "is_pruned", default=True, show_default=True, help="Move runs without a frame away."
)
@click.option(
    "--prune-output-root", metavar="DIR", help="Directory for those runs. [the output root with -pruned appended]"
)
@click.option("--prune-with", type=click.Choice(["program", "scheduler"]), default="program", show_default=True,
              help="What moves them: the simulator itself, or gpuyard at the end.")  # fmt: skip
@click.option("--prune-keeps", type=click.Choice(["here", "there"]),
              help="With --prune-with program: the simulator leaves runs with data in the output root (here), or moves "
              "them to the prune root (there). [detected]")  # fmt: skip
@click.option("--frames", metavar="GLOB", help="With --prune-with scheduler: files that count as frames. [*]")
@option("max-frames", "F", whole(1), "Maximum number of frames per run. [the simulator's default]")
@click.option("--headless/--no-headless", "is_headless", default=True, show_default=True, help="Without a window.")
@click.option("--calibrate", metavar="FILE", help="Print limits to use, by a log of `gpuyard watch --log`; no run.")
@click.argument("rest", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGS...]")
def command(rest: tuple[str, ...], **typed: Any) -> int:
    """Generate data with a simulator, run after run, within limits on CPU, RAM and GPU.

    A run is PROGRAM --mode datagen --headless --prune-empty --prune-output-root DIR --output-root DIR --seed S
    --max-frames F, and the arguments after `--`; --dry-run prints all commands. The runs are jobs of the queue and
    continue when this terminal is closed. The output root of a run is its own folder, DIR/run-000017.

    \b
    gpuyard datagen --count 400 --concurrency 6 --max-gpu 80 --max-gpu-mem-mb 8000
    gpuyard datagen --count 400 --program ./sim --prune-with scheduler --frames '*.png' -- --scene city

    Exit status 0 if all runs succeeded, else 1.
    """
    if typed["calibrate"] is not None:
        return _calibrate(Path(typed["calibrate"]), as_json=typed["as_json"])
    mode = run_mode(typed)
    prunes = typed["prune_with"] if typed["is_pruned"] else None
    if typed["frames"] is not None and prunes != "scheduler":
        raise UserError("--frames needs --prune-with scheduler", hint="add --prune-with scheduler")
    if typed["prune_keeps"] is not None and prunes != "program":
        raise UserError("--prune-keeps needs --prune-with program", hint="leave it out, or the other option")
    root = absolute(typed["output_root"])
    plan = make_plan(
        typed,
        name=typed["name"] or _NAME,
        command=_command(typed, rest, prunes_itself=prunes == "program"),
        root=root,
        prunes=prunes,
        prune_keeps=typed["prune_keeps"],
        pruned_root=None if prunes is None else absolute(typed["prune_output_root"] or f"{root}-pruned"),
    )
    return run_batch(plan, mode)


def _command(typed: dict[str, Any], rest: tuple[str, ...], *, prunes_itself: bool) -> tuple[str, ...]:
    if not typed["program"] or typed["program"].startswith("-"):
        raise UserError(f"--program '{typed['program']}' is not a program", hint="name your simulator, or its path")
    headless = ("--headless",) if typed["is_headless"] else ()
    prune = ("--prune-empty", "--prune-output-root", "{prune_root}") if prunes_itself else ()
    frames = ("--max-frames", typed["max_frames"]) if typed["max_frames"] else ()
    output = ("--output-root", "{output}", "--seed", "{seed}")
    return (typed["program"], "--mode", "datagen", *headless, *prune, *output, *frames, *rest)


def _calibrate(log: Path, *, as_json: bool) -> int:
    from gpuyard.recipes.batch.propose_limits import propose_limits, read_sample_log

    limits = propose_limits(read_sample_log(log))
    if as_json:
        say_json(to_builtins(limits))
        return 0
    options = ["" if limit.value is None else f"{limit.option} {limit.value}" for limit in limits]
    width = max(map(len, options))
    say(*(f"{option:{width}}  # {limit.why}" for option, limit in zip(options, limits, strict=True)))
    return 0
