"""`gpuyard datagen`: the batch of those who make data with a simulator."""

from typing import Any

import click

from gpuyard.errors import UserError
from gpuyard.recipes.batch.plan import BatchPlan
from gpuyard.recipes.batch.prune_empty_runs import ANY_FILE
from gpuyard.ui.cli.recipes.batch import carry_out
from gpuyard.ui.cli.recipes.batch_options import (
    absolute,
    batch_options,
    conduct_of,
    count_of,
    queue_options,
    whole_option,
)

_NAME = "datagen"


@click.command("datagen", context_settings={"allow_interspersed_args": False})
@batch_options(stagger="2s", name=_NAME)
@click.option("--program", default="sim_view", show_default=True, metavar="PROGRAM", help="The simulator, or its path.")
@click.option("--output-root", default="out", show_default=True, metavar="DIR", help="Each run gets a folder in it.")
@click.option(
    "--prune/--no-prune", "is_pruned", default=True, show_default=True, help="Move runs without a frame away."
)
@click.option("--prune-output-root", metavar="DIR", help="Where to. [the output root's name and -pruned]")
@click.option("--prune-with", type=click.Choice(["program", "scheduler"]), default="program", show_default=True,
              help="Who looks and moves: the simulator itself, or gpuyard when all is over.")  # fmt: skip
@click.option("--prune-keeps", type=click.Choice(["here", "there"]),
              help="With --prune-with program: the simulator leaves runs with data in the output root (here), or moves "
              "them to the prune root (there). [found out]")  # fmt: skip
@click.option("--frames", metavar="GLOB", help="With --prune-with scheduler: which files are frames. [*]")
@whole_option("max-frames", "F", 1, "How many frames a run makes at most. [the simulator's own]")
@click.option("--headless/--no-headless", "is_headless", default=True, show_default=True, help="Without a window.")
@click.argument("rest", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGS...]")
def command(rest: tuple[str, ...], **typed: Any) -> int:
    """Generate data with a simulator, run after run, each launched when the machine has headroom for it.

    A run is PROGRAM --mode datagen --headless --prune-empty --prune-output-root DIR --output-root DIR --seed S
    --max-frames F, and whatever stands after `--`; --dry-run prints them all. The runs are jobs of the queue, and
    outlive this terminal. A run's output root is a folder of its own, DIR/run-000017.

    \b
    gpuyard datagen --count 400 --concurrency 6 --max-gpu 80 --max-gpu-mem-mb 8000
    gpuyard datagen --count 400 --program ./sim --prune-with scheduler --frames '*.png' -- --scene city

    Exit status 0 where all runs succeeded, 1 where some did not.
    """
    conduct = conduct_of(typed)
    plan = _plan(rest, typed)
    return carry_out(plan, conduct)


def _plan(rest: tuple[str, ...], typed: dict[str, Any]) -> BatchPlan:
    prunes = typed["prune_with"] if typed["is_pruned"] else None
    if typed["frames"] is not None and prunes != "scheduler":
        raise UserError("--frames says what the scheduler prunes by", hint="add --prune-with scheduler")
    if typed["prune_keeps"] is not None and prunes != "program":
        raise UserError("--prune-keeps is about a simulator that prunes", hint="leave it out, or the other option")
    root = absolute(typed["output_root"])
    pruned_root = None if prunes is None else absolute(typed["prune_output_root"] or f"{root}-pruned")
    return BatchPlan(
        name=typed["name"] or _NAME,
        command=_command(typed, rest, is_told_to_prune=prunes == "program"),
        count=count_of(typed),
        root=root,
        seed=int(typed["seed"]),
        pruned_root=pruned_root,
        prunes=prunes,
        prune_keeps=typed["prune_keeps"],
        frames=typed["frames"] or ANY_FILE,
        options=queue_options(typed),
    )


def _command(typed: dict[str, Any], rest: tuple[str, ...], *, is_told_to_prune: bool) -> tuple[str, ...]:
    if not typed["program"] or typed["program"].startswith("-"):
        raise UserError(f"--program '{typed['program']}' is not a program", hint="name your simulator, or its path")
    headless = ("--headless",) if typed["is_headless"] else ()
    prune = ("--prune-empty", "--prune-output-root", "{prune_root}") if is_told_to_prune else ()
    frames = ("--max-frames", typed["max_frames"]) if typed["max_frames"] else ()
    output = ("--output-root", "{output}", "--seed", "{seed}")
    return (typed["program"], "--mode", "datagen", *headless, *prune, *output, *frames, *rest)
