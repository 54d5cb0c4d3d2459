"""`gpuyard datagen`: a batch of runs of a simulator that generates data."""

from pathlib import Path

from msgspec import to_builtins

from gpuyard.errors import UserError
from gpuyard.model.option import Option
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
