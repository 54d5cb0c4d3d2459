"""`gpuyard batch`: submits many runs of one command to the queue, and shows their progress until the end."""

import contextlib
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.model.option import Option
from gpuyard.model.submission import SubmissionRequest, parse_submission
from gpuyard.model.submit_options import SUBMIT_OPTIONS
from gpuyard.probes.sample_log import RowLog
from gpuyard.recipes.batch.disk_warning import disk_warning
from gpuyard.recipes.batch.finish import read_summary
from gpuyard.recipes.batch.plan import (
    BatchPart,
    BatchPlan,
    BatchRecord,
    check_plan,
    default_root,
    read_part_status,
    run_command,
)
from gpuyard.recipes.batch.start_or_continue import BatchChoice, ExistingBatch, choose_batch, start_batch
from gpuyard.ui.cli import EXIT_FAULT, EXIT_INTERRUPTED
from gpuyard.ui.cli.ask_daemon import request
from gpuyard.ui.cli.command_grammar import Arguments, Typed, Verb
from gpuyard.ui.cli.recipes.batch_options import RunMode, batch_options, make_plan, run_mode, to_name
from gpuyard.ui.cli.terminal import absolute, is_terminal, note, paint, say, say_json

_TERMINATED = 128 + signal.SIGTERM


VERB = Verb(
    """Run a command many times, within limits on CPU, RAM and GPU.

    {index}, {seed} and {output} in the command are replaced for each run: its number from 0, its seed, and its folder.
    A run starts only while CPU, RAM and GPU are within their limits. The runs are jobs of the queue and continue when
    this terminal is closed; a summary is printed at the end.

    \b
    gpuyard batch --count 100 --concurrency 4 -- python make.py --seed {seed} --out {output}
    gpuyard batch --count 400 --concurrency 6 --max-gpu 80 --run-vram 2G --output-root data -- ./make {seed} {output}

    Exit status 0 if all runs succeeded, else 1.
    """,
    (
        *batch_options(stagger="0s", name="the program's"),
        Option(
            "output-root",
            "text",
            "DIR",
            "Directory with a folder per run, {output}.",
            note="in gpuyard's data directory",
        ),
        Option("prune-output-root", "text", "DIR", "Move runs without a frame here at the end."),
        Option("frames", "text", "GLOB", "Files that count as frames, for --prune-output-root.", note="*"),
        SUBMIT_OPTIONS["image"].but(help="Run each in a container of this image, which sees the output root."),
        SUBMIT_OPTIONS["mount"],
        SUBMIT_OPTIONS["container-option"],
    ),
    Arguments("-- CMD...", is_program=True),
)


def run(typed: Typed) -> int:
    program = tuple(typed.arguments)
    if not program:
        raise UserError("no program given", hint="write it last: gpuyard batch --count 9 -- ./make {seed}")
    root, pruned_root = typed.text("output-root"), typed.text("prune-output-root")
    if typed.text("frames") is not None and pruned_root is None:
        raise UserError("--frames needs --prune-output-root", hint="add --prune-output-root DIR")
    mode = run_mode(typed, root)
    name = typed.text("name") or to_name(program[0])
    plan = make_plan(
        typed,
        name=name,
        command=program,
        root=default_root(name) if root is None else absolute(root),
        prunes=None if pruned_root is None else "scheduler",
        pruned_root=None if pruned_root is None else absolute(pruned_root),
    )
    return run_batch(plan, mode)


def run_batch(plan: BatchPlan, mode: RunMode) -> int:
    check_plan(plan)
    _check_options(plan)
    if mode.is_dry:
        return _print_commands(choose_batch(plan, mode.existing))
    if "sample-log" in plan.options:
        from gpuyard.daemon.monitor.sampling import COLUMNS

        try:
            RowLog(Path(plan.options["sample-log"]), COLUMNS)
        except EnvironmentFault as error:
            raise EnvironmentFault(str(error), hint="name another file with --sample-log") from error
    return _start_and_follow(plan, mode)


def _print_commands(choice: BatchChoice) -> int:
    """Print the commands of new runs; only the queue knows which existing runs would be retried."""
    _note_choice(choice)
    _warn_of_disk(choice)
    before, count = choice.before, choice.plan.count
    first = before.plan.count if before is not None and count > before.plan.count else 0
    say(*(shlex.join(run_command(choice.plan, index)) for index in range(first, count)))
    return 0


def _start_and_follow(plan: BatchPlan, mode: RunMode) -> int:
    _warn_of_disk(choose_batch(plan, mode.existing))
    with _delay_interrupt() as interrupts:
        choice, record = start_batch(plan, mode.existing)
    before = choice.before
    status, is_new = read_part_status(record.parts[-1]), before is None or record.parts[-1] not in before.parts
    if status is None:  # it finished long ago, and the queue has deleted its jobs
        return _show_summary(record, mode)
    is_over = status["done"] and not is_new
    left = status["count"] - (0 if is_new else status["counts"].get("succeeded", 0))
    _note_choice(
        choice, None if is_over or before is None else f"continuing with {left:,} of {record.plan.count:,} runs"
    )
    if not is_over:
        if not is_new and before is not None and before.plan.options != plan.options:
            note("gpuyard: queued runs keep the limits they were submitted with; stop the batch first to change them")
        if mode.is_detached:
            return _detach(record, mode)
    exit_status = _follow(record, mode, is_interrupted=bool(interrupts))
    return _show_summary(record, mode) if exit_status is None else exit_status


@contextlib.contextmanager
def _delay_interrupt() -> Iterator[list[int]]:
    """Delay the first Ctrl-C until the batch is submitted; a second one takes effect at once."""
    before = signal.getsignal(signal.SIGINT)
    interrupts: list[int] = []

    def delay(signum: int, _: object) -> None:
        interrupts.append(signum)
        signal.signal(signal.SIGINT, before)

    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, delay)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


def _check_options(plan: BatchPlan) -> None:
    """Raise for invalid options before any folder is made or job submitted."""
    for text in (*plan.command, plan.root, plan.pruned_root or "", plan.frames, plan.options.get("sample-log", "")):
        if text != text.encode(errors="replace").decode():
            raise UserError(f"{text!r} is not UTF-8", hint="batch.json cannot store it; use another name")
    parse_submission(SubmissionRequest(cwd="/", environment={}, command=plan.command, options=plan.options))


# In the foreground


def _follow(record: BatchRecord, mode: RunMode, *, is_interrupted: bool) -> int | None:
    from gpuyard.ui.views.batch_view import follow

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))  # a normal exit, which removes the lines
    part, is_stopped = record.parts[-1], False
    while True:
        try:
            if is_interrupted:
                is_interrupted = False
                raise KeyboardInterrupt
            _check_finish(follow(record.plan.name, part), record.plan)
        except KeyboardInterrupt:
            can_ask = not is_stopped and sys.stdin is not None and is_terminal(sys.stdin) and is_terminal(sys.stderr)
            if not can_ask or not _asks_to_stop():
                _note_how_to_resume(record, mode)
                return EXIT_INTERRUPTED
            # Not the job after the runs, which writes the summary.
            request("POST", "/jobs/cancel", body={"ids": _ids(part)}, is_repeatable=True)
            note("gpuyard: stopping: running jobs get SIGTERM, and no more runs start")
            is_stopped = True
        else:
            return None


def _check_finish(job: dict[str, Any], plan: BatchPlan) -> None:
    again = f"`gpuyard retry {job['id']}` runs it again, and it writes {plan.root}/summary.json after the last run"
    if job["state"] == "cancelled":
        raise EnvironmentFault(f"job {job['id']}, which sums up the runs, was cancelled", hint=again)
    if job["state"] != "succeeded":
        raise EnvironmentFault(
            f"the runs have finished, but job {job['id']}, which sums them up, is {job['state']}",
            hint=f"`gpuyard logs {job['id']}` may say why; {again}",
        )


def _asks_to_stop() -> bool:
    try:
        sys.stderr.write("\nLeave it running, or stop it? [L/s] ")
        sys.stderr.flush()
        answer = sys.stdin.readline()
    except KeyboardInterrupt:
        answer = ""
    if not answer.endswith("\n"):
        note("")
    return answer.strip().lower() in ("s", "stop")


def _ids(part: BatchPart) -> str:
    return str(part.first) if part.first == part.last else f"{part.first}-{part.last}"


# Messages


def _note_choice(choice: BatchChoice, more: str | None = None) -> None:
    if text := ": ".join(filter(None, (choice.note, more))):
        note(f"gpuyard: {text}")


def _warn_of_disk(choice: BatchChoice) -> None:
    if text := disk_warning(choice.plan):
        note(f"gpuyard: warning: {text}")


def _detach(record: BatchRecord, mode: RunMode) -> int:
    part = record.parts[-1]
    if mode.as_json:
        ids = {"ids": _ids(part), "first": part.first, "last": part.last, "finish": part.finish}
        say_json({"name": record.plan.name, **ids, "root": record.plan.root})
    else:
        say(_ids(part))
    _note_how_to_resume(record, mode)
    return 0


def _note_how_to_resume(record: BatchRecord, mode: RunMode) -> None:
    note(f"gpuyard: the batch continues in the queue as jobs {_ids(record.parts[-1])}; `gpuyard queue` shows them")
    note(f"  to follow it again, or continue it later:\n  {_resume_command(record.plan, mode)}")


def _resume_command(plan: BatchPlan, mode: RunMode) -> str:
    """Return the command line with --resume and this batch's output root."""
    verb, *arguments = sys.argv[1:]
    # Remove the first occurrence: arguments of the program come last.
    for flag, is_typed in (("--detach", mode.is_detached), ("--append", mode.existing is ExistingBatch.APPEND)):
        if is_typed:
            arguments.remove(flag)
    root = [] if plan.root == mode.root else ["--output-root", plan.root]
    if root and mode.is_root_typed:
        arguments = _without(arguments, "--output-root")
    resume = [] if mode.existing is ExistingBatch.RESUME else ["--resume"]
    return shlex.join(["gpuyard", verb, *resume, *root, *arguments])


def _without(arguments: list[str], option: str) -> list[str]:
    at = next(at for at, text in enumerate(arguments) if text == option or text.startswith(f"{option}="))
    return arguments[:at] + arguments[at + (2 if arguments[at] == option else 1) :]


def _show_summary(record: BatchRecord, mode: RunMode) -> int:
    from gpuyard.ui.views.batch_view import summary_lines

    root = Path(record.plan.root)
    summary = read_summary(root)
    if summary is None:
        raise EnvironmentFault(f"no summary in {root}", hint="the queue has deleted these runs; start a new batch")
    if mode.as_json:
        say_json(to_builtins(summary))
    else:
        first, *others = summary_lines(summary, record.plan)
        say(paint(first, "green" if summary.is_whole else "red"), *others)
    if summary.is_whole:
        return 0
    sys.stdout.flush()
    note(f"gpuyard: to retry the runs that did not succeed:\n  {_resume_command(record.plan, mode)}")
    return EXIT_FAULT
