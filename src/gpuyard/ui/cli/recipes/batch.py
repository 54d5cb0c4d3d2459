"""`gpuyard batch`: many runs of one command, begun here, done by the queue, and followed to the end where one likes."""

import contextlib
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.recipes.batch.plan import (
    BatchPart,
    BatchPlan,
    BatchRecord,
    check_plan,
    default_root,
    read_part_status,
    run_command,
)
from gpuyard.recipes.batch.prune_empty_runs import ANY_FILE
from gpuyard.recipes.batch.start_or_continue import BatchChoice, ExistingBatch, choose_batch, start_batch
from gpuyard.ui.cli import EXIT_FAULT, EXIT_INTERRUPTED
from gpuyard.ui.cli.recipes.batch_options import (
    Conduct,
    absolute,
    batch_options,
    conduct_of,
    count_of,
    queue_options,
    word_of,
)
from gpuyard.ui.cli.terminal import is_terminal, note, paint, say, say_json

if TYPE_CHECKING:
    from gpuyard.recipes.batch.finish import Summary

_TERMINATED = 128 + signal.SIGTERM


@click.command("batch", context_settings={"allow_interspersed_args": False})
@batch_options(stagger="0s", name="the program's")
@click.option("--output-root", metavar="DIR", help="Each run gets a folder in it, {output}. [one of gpuyard's own]")
@click.option("--prune-output-root", metavar="DIR", help="When all is over, move runs without a frame there.")
@click.option("--frames", metavar="GLOB", help="Which files are frames, for --prune-output-root. [*]")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="-- CMD...")
def command(program: tuple[str, ...], **typed: Any) -> int:
    """Run a command many times, each time when the machine has room for it.

    {index}, {seed} and {output} in the command are each run's own: its number from 0, its seed, and its folder. A run
    is launched only while the CPU, RAM and the GPU are within their bounds. The runs are jobs of the queue, and
    outlive this terminal; a summary is printed when all is over.

    \b
    gpuyard batch --count 100 --concurrency 4 -- python make.py --seed {seed} --out {output}
    gpuyard batch --count 400 --concurrency 6 --max-gpu 80 --run-vram 2G --output-root data -- ./make {seed} {output}

    Exit status 0 where all runs succeeded, 1 where some did not.
    """
    if not program:
        raise UserError("there is no program to run", hint="write it last: gpuyard batch --count 9 -- ./make {seed}")
    if typed["frames"] is not None and typed["prune_output_root"] is None:
        raise UserError("--frames says what is pruned by", hint="add --prune-output-root DIR")
    conduct = conduct_of(typed)
    return carry_out(_plan(program, typed), conduct)


def _plan(program: tuple[str, ...], typed: dict[str, Any]) -> BatchPlan:
    name = typed["name"] or word_of(program[0])
    root, pruned_root = typed["output_root"], typed["prune_output_root"]
    return BatchPlan(
        name=name,
        command=program,
        count=count_of(typed),
        root=default_root(name) if root is None else absolute(root),
        seed=int(typed["seed"]),
        pruned_root=None if pruned_root is None else absolute(pruned_root),
        prunes=None if pruned_root is None else "scheduler",
        frames=typed["frames"] or ANY_FILE,
        options=queue_options(typed),
    )


def carry_out(plan: BatchPlan, conduct: Conduct) -> int:
    """The exit status."""
    check_plan(plan)
    _check_options(plan)
    if conduct.is_dry:
        return _print_commands(choose_batch(plan, conduct.way))
    _check_sample_log(plan)
    return _begin_and_follow(plan, conduct)


def _print_commands(choice: BatchChoice) -> int:
    """Those of new runs: which of the others would be run again only the queue knows."""
    _tell_choice(choice)
    first = (
        choice.before.plan.count if choice.before is not None and choice.plan.count > choice.before.plan.count else 0
    )
    for index in range(first, choice.plan.count):
        say(shlex.join(run_command(choice.plan, index)))
    return 0


def _begin_and_follow(plan: BatchPlan, conduct: Conduct) -> int:
    with _not_in_the_middle() as heard:
        choice, record = start_batch(plan, conduct.way)
    before = choice.before
    standing, is_new = read_part_status(record.parts[-1]), before is None or record.parts[-1] not in before.parts
    if standing is None:  # it was over so long ago that the queue has forgotten it
        return _tell_summary(record, conduct)
    is_over = standing["done"] and not is_new
    left = standing["count"] - (0 if is_new else standing["counts"].get("succeeded", 0))
    _tell_choice(
        choice, None if is_over or before is None else f"it goes on with {left:,} of {record.plan.count:,} runs"
    )
    if not is_over:
        if not is_new and before is not None and before.plan.options != plan.options:
            note("gpuyard: what is in the queue keeps the bounds it was begun with; stop it first to change them")
        if conduct.is_detached:
            return _detach(record, conduct)
    status = _follow(record, conduct, is_interrupted=bool(heard))
    return _tell_summary(record, conduct) if status is None else status


@contextlib.contextmanager
def _not_in_the_middle() -> Iterator[list[int]]:
    """One Ctrl-C is heard once the batch has begun; a second one at once."""
    before = signal.getsignal(signal.SIGINT)
    heard: list[int] = []

    def hear(signum: int, _: object) -> None:
        heard.append(signum)
        signal.signal(signal.SIGINT, before)

    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, hear)
    try:
        yield heard
    finally:
        signal.signal(signal.SIGINT, before)


def _check_options(plan: BatchPlan) -> None:
    """Before anything is made or sent."""
    from gpuyard.core.job.submission import SubmissionRequest, parse_submission

    for word in (*plan.command, plan.root, plan.pruned_root or "", plan.frames, plan.options.get("sample-log", "")):
        if word != word.encode(errors="replace").decode():
            raise UserError(f"{word!r} is not UTF-8", hint="batch.json could not name it; give it another name")
    parse_submission(SubmissionRequest(cwd="/", environment={}, command=plan.command, options=plan.options))


def _check_sample_log(plan: BatchPlan) -> None:
    if "sample-log" in plan.options:
        from gpuyard.daemon.monitor.sample_logs import COLUMNS
        from gpuyard.probes.sample_log import RowLog

        try:
            RowLog(Path(plan.options["sample-log"]), COLUMNS)
        except EnvironmentFault as error:
            raise EnvironmentFault(str(error), hint="name another file with --sample-log") from error


# In the foreground


def _follow(record: BatchRecord, conduct: Conduct, *, is_interrupted: bool) -> int | None:
    """Until all is over; the exit status where somebody does not want to see it."""
    from gpuyard.ui.views.batch_progress import follow

    signal.signal(signal.SIGTERM, _end)
    part, is_stopped = record.parts[-1], False
    while True:
        try:
            if is_interrupted:
                is_interrupted = False
                raise KeyboardInterrupt
            _check_finish(follow(record.plan.name, part))
        except KeyboardInterrupt:
            can_ask = not is_stopped and sys.stdin is not None and is_terminal(sys.stdin) and is_terminal(sys.stderr)
            if not can_ask or not _is_to_be_stopped():
                _tell_way_back(record, conduct)
                return EXIT_INTERRUPTED
            _stop(part)
            is_stopped = True
        else:
            return None


def _check_finish(job: dict[str, Any]) -> None:
    """Of the job that comes after all runs."""
    if job["state"] != "succeeded":
        raise EnvironmentFault(
            f"the runs are over, but job {job['id']}, which sums them up, has not succeeded: {job['state']}",
            hint=f"`gpuyard logs {job['id']}` may say why; `gpuyard retry {job['id']}` does it again",
        )


def _end(*_: object) -> NoReturn:
    """What ends us must not leave the terminal without its cursor."""
    sys.exit(_TERMINATED)


def _is_to_be_stopped() -> bool:
    try:
        sys.stderr.write("\nLeave it running, or stop it? [L/s] ")
        sys.stderr.flush()
        answer = sys.stdin.readline()
    except KeyboardInterrupt:
        answer = ""
    if not answer.endswith("\n"):
        note("")
    return answer.strip().lower() in ("s", "stop")


def _stop(part: BatchPart) -> None:
    """The runs only: what comes after them is the summary."""
    from gpuyard.connect.fast_http import connect

    with connect(start=True) as daemon:
        daemon.request("POST", "/jobs/cancel", body={"ids": _ids(part)}, is_repeatable=True)
    note("gpuyard: what ran is told to end, and nothing more is started")


def _ids(part: BatchPart) -> str:
    return str(part.first) if part.first == part.last else f"{part.first}-{part.last}"


# What is said


def _tell_choice(choice: BatchChoice, more: str | None = None) -> None:
    """In one line."""
    if text := ": ".join(filter(None, (choice.note, more))):
        note(f"gpuyard: {text}")


def _detach(record: BatchRecord, conduct: Conduct) -> int:
    part = record.parts[-1]
    if conduct.as_json:
        ids = {"ids": _ids(part), "first": part.first, "last": part.last, "finish": part.finish}
        say_json({"name": record.plan.name, **ids, "root": record.plan.root})
    else:
        say(_ids(part))
    _tell_way_back(record, conduct)
    return 0


def _tell_way_back(record: BatchRecord, conduct: Conduct) -> None:
    note(f"gpuyard: the queue goes on with it, as jobs {_ids(record.parts[-1])}; `gpuyard queue` shows them")
    note(f"  to follow it again, and to go on with what is left:\n  {_again(record.plan, conduct)}")


def _again(plan: BatchPlan, conduct: Conduct) -> str:
    """The command that was typed, so that it goes on with this very batch."""
    verb, *words = sys.argv[1:]
    # The first one each time: what the program is told comes last.
    for flag, is_typed in (("--detach", conduct.is_detached), ("--append", conduct.way is ExistingBatch.APPEND)):
        if is_typed:
            words.remove(flag)
    root = [] if plan.root == conduct.root else ["--output-root", plan.root]
    if root and conduct.is_root_typed:
        words = _without(words, "--output-root")
    resume = [] if conduct.way is ExistingBatch.RESUME else ["--resume"]
    return shlex.join(["gpuyard", verb, *resume, *root, *words])


def _without(words: list[str], option: str) -> list[str]:
    place = next(place for place, word in enumerate(words) if word == option or word.startswith(f"{option}="))
    return words[:place] + words[place + (2 if words[place] == option else 1) :]


def _tell_summary(record: BatchRecord, conduct: Conduct) -> int:
    from msgspec import to_builtins

    from gpuyard.recipes.batch.finish import read_summary
    from gpuyard.ui.views.batch_summary import summary_lines

    root = Path(record.plan.root)
    summary: Summary | None = read_summary(root)
    if summary is None:
        raise EnvironmentFault(f"there is no summary in {root}", hint="the queue has forgotten these runs; begin anew")
    if conduct.as_json:
        say_json(to_builtins(summary))
    else:
        first, *others = summary_lines(summary, record.plan)
        say(paint(first, "green" if summary.is_whole else "red"))
        for line in others:
            say(line)
    if summary.is_whole:
        return 0
    sys.stdout.flush()
    note(f"gpuyard: to try again what has not succeeded:\n  {_again(record.plan, conduct)}")
    return EXIT_FAULT
