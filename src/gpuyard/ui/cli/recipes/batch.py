"""`gpuyard batch`: submits many runs of one command to the queue, and shows their progress until the end; with the
options that `gpuyard datagen` has too. Their values stay text, which the queue parses; what it does not know is checked
here."""

import contextlib
import os
import re
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
from gpuyard.queue.batch_gates import COLUMNS
from gpuyard.recipes.batch.finish import read_summary
from gpuyard.recipes.batch.plan import (
    BatchPlan,
    BatchRecord,
    ExistingBatch,
    choose_batch,
    default_root,
    disk_warning,
    read_part_status,
    run_command,
    start_batch,
)
from gpuyard.recipes.batch.prune_empty_runs import ANY_FILE
from gpuyard.ui.cli.ask_daemon import request
from gpuyard.ui.cli.command_grammar import JSON, Arguments, Typed, Verb
from gpuyard.ui.cli.terminal import absolute, is_terminal, note, paint, say, say_json
from gpuyard.ui.cli.verbs import EXIT_FAULT, EXIT_INTERRUPTED
from gpuyard.ui.views.batch_view import follow, summary_lines


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
        Option("output-root", "text", "DIR", "Directory with a folder per run, {output}.",
               note="in gpuyard's data directory"),
        Option("prune-output-root", "text", "DIR", "Move runs without a frame here at the end."),
        Option("frames", "text", "GLOB", "Files that count as frames, for --prune-output-root.", note="*"),
        SUBMIT_OPTIONS["image"].but(help="Run each in a container of this image, which sees the output root."),
        SUBMIT_OPTIONS["mount"],
        SUBMIT_OPTIONS["container-option"],
    ),
    Arguments("-- CMD...", is_program=True),
)  # fmt: skip


def make_plan(typed: Typed, **own: Any) -> BatchPlan:
    values = typed.values()
    if values["count"] is None:
        raise UserError("how many runs?", hint="give --count, such as --count 400")
    name, log, devices = typed.text("name"), typed.text("sample-log"), typed.text("device")
    if name is not None and name != _to_name(name):
        raise UserError(f"--name '{name}' is not one plain word", hint="letters, digits, . _ + and -, at most 60")
    if log is not None and not log.endswith((".csv", ".jsonl")):
        raise UserError(f"--sample-log: cannot log to '{log}'", hint="name a file that ends in .csv or .jsonl")
    if devices is not None and not any(map(str.strip, devices.split(","))):
        raise UserError("--device names no GPU", hint="write it as 0,2 or leave it out")
    # All options of a submission, but for those that follow from the plan or have another meaning in a batch.
    names = {each: each for each in SUBMIT_OPTIONS if each not in ("name", "output-root", "seed")}
    names["run-vram"] = "vram"
    given = {option.name: typed.options.get(option.name, option.default) for option in typed.verbs[-1].options}
    options = {names[each]: value for each, value in given.items() if each in names and value is not None}
    if log:  # the daemon has another working directory
        options["sample-log"] = absolute(log)
    frames = typed.text("frames") or ANY_FILE
    return BatchPlan(count=values["count"], seed=values["seed"], frames=frames, options=options, **own)


def _to_name(program: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", os.path.basename(program))[:60].strip("-") or "batch"


def run(typed: Typed) -> int:
    program = tuple(typed.arguments)
    if not program:
        raise UserError("no program given", hint="write it last: gpuyard batch --count 9 -- ./make {seed}")
    root, pruned_root = typed.text("output-root"), typed.text("prune-output-root")
    if typed.text("frames") is not None and pruned_root is None:
        raise UserError("--frames needs --prune-output-root", hint="add --prune-output-root DIR")
    name = typed.text("name") or _to_name(program[0])
    plan = make_plan(
        typed,
        name=name,
        command=program,
        root=default_root(name) if root is None else absolute(root),
        prunes=None if pruned_root is None else "scheduler",
        pruned_root=None if pruned_root is None else absolute(pruned_root),
    )
    return run_batch(plan, typed)


def run_batch(plan: BatchPlan, typed: Typed) -> int:
    existing: ExistingBatch = "append" if typed.flag("append") else "resume" if typed.flag("resume") else "again"
    if typed.flag("resume") and existing == "append":
        raise UserError("--resume and --append exclude each other", hint="finish the batch first, then add runs to it")
    if existing != "again" and typed.values()["output-root"] is None:
        raise UserError(f"--{existing}: which batch?", hint="name its folder with --output-root")
    # Invalid options are errors before any folder is made or job submitted.
    for text in (*plan.command, plan.root, plan.pruned_root or "", plan.frames, plan.options.get("sample-log", "")):
        if text != text.encode(errors="replace").decode():
            raise UserError(f"{text!r} is not UTF-8", hint="batch.json cannot store it; use another name")
    parse_submission(SubmissionRequest(cwd="/", environment={}, command=plan.command, options=plan.options))
    choice = choose_batch(plan, existing)
    if warning := disk_warning(choice.plan):
        note(f"gpuyard: warning: {warning}")
    if typed.flag("dry-run"):  # only the queue knows which existing runs would be retried: print new commands
        if choice.note:
            note(f"gpuyard: {choice.note}")
        before, count = choice.before, choice.plan.count
        first = before.plan.count if before is not None and count > before.plan.count else 0
        say(*(shlex.join(run_command(choice.plan, index)) for index in range(first, count)))
        return 0
    if "sample-log" in plan.options:
        try:
            RowLog(Path(plan.options["sample-log"]), COLUMNS)
        except EnvironmentFault as error:
            raise EnvironmentFault(str(error), hint="name another file with --sample-log") from error
    return _start_and_follow(plan, existing, typed)


def _start_and_follow(plan: BatchPlan, existing: ExistingBatch, typed: Typed) -> int:
    with _delay_interrupt() as interrupts:
        choice, record = start_batch(plan, existing)
    before, part = choice.before, record.parts[-1]
    status, is_new = read_part_status(part), before is None or part not in before.parts
    if status is None:  # it finished long ago, and the queue has deleted its jobs
        return _show_summary(record, typed)
    is_over = status["done"] and not is_new
    left = status["count"] - (0 if is_new else status["counts"].get("succeeded", 0))
    continues = None if is_over or before is None else f"continuing with {left:,} of {record.plan.count:,} runs"
    if text := ": ".join(filter(None, (choice.note, continues))):
        note(f"gpuyard: {text}")
    if not is_over and not is_new and before is not None and before.plan.options != plan.options:
        note("gpuyard: queued runs keep the limits they were submitted with; stop the batch first to change them")
    if is_over or not typed.flag("detach"):
        return _follow(record, typed, is_interrupted=bool(interrupts))
    if typed.flag("json"):
        ids = {"ids": part.ids, "first": part.first, "last": part.last, "finish": part.finish}
        say_json({"name": record.plan.name, **ids, "root": record.plan.root})
    else:
        say(part.ids)
    _note_how_to_resume(record, typed)
    return 0


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


def _follow(record: BatchRecord, typed: Typed, *, is_interrupted: bool) -> int:
    """Show the progress and the summary; Ctrl-C asks whether to leave the batch running."""
    # A normal exit, which removes the lines.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    part, job, is_stopped = record.parts[-1], dict[str, Any](), False
    while not job:
        try:
            if is_interrupted:
                is_interrupted = False
                raise KeyboardInterrupt
            job = follow(record.plan.name, part)
        except KeyboardInterrupt:
            can_ask = not is_stopped and sys.stdin is not None and is_terminal(sys.stdin) and is_terminal(sys.stderr)
            if not can_ask or not _asks_to_stop():
                _note_how_to_resume(record, typed)
                return EXIT_INTERRUPTED
            # Not the job after the runs, which writes the summary.
            request("POST", "/jobs/cancel", body={"ids": part.ids}, is_repeatable=True)
            note("gpuyard: stopping: running jobs get SIGTERM, and no more runs start")
            is_stopped = True
    if job["state"] == "succeeded":
        return _show_summary(record, typed)
    again = (
        f"`gpuyard retry {job['id']}` runs it again, and it writes {record.plan.root}/summary.json after the last run"
    )
    if job["state"] == "cancelled":
        raise EnvironmentFault(f"job {job['id']}, which sums up the runs, was cancelled", hint=again)
    problem = f"the runs have finished, but job {job['id']}, which sums them up, is {job['state']}"
    raise EnvironmentFault(problem, hint=f"`gpuyard logs {job['id']}` may say why; {again}")


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


def _note_how_to_resume(record: BatchRecord, typed: Typed) -> None:
    note(f"gpuyard: the batch continues in the queue as jobs {record.parts[-1].ids}; `gpuyard queue` shows them")
    note(f"  to follow it again, or continue it later:\n  {_resume_command(record.plan, typed)}")


def _resume_command(plan: BatchPlan, typed: Typed) -> str:
    """Return the command line with --resume and this batch's output root."""
    verb, *arguments = sys.argv[1:]
    for flag in filter(typed.flag, ("detach", "append")):
        arguments.remove(f"--{flag}")  # the first one: arguments of the program come last
    named = typed.values()["output-root"]
    root = [] if named is not None and plan.root == absolute(named) else ["--output-root", plan.root]
    if root and "output-root" in typed.options:
        at = next(at for at, text in enumerate(arguments) if text.partition("=")[0] == "--output-root")
        del arguments[at : at + (2 if arguments[at] == "--output-root" else 1)]
    resume = [] if typed.flag("resume") else ["--resume"]
    return shlex.join(["gpuyard", verb, *resume, *root, *arguments])


def _show_summary(record: BatchRecord, typed: Typed) -> int:
    root = Path(record.plan.root)
    summary = read_summary(root)
    if summary is None:
        raise EnvironmentFault(f"no summary in {root}", hint="the queue has deleted these runs; start a new batch")
    if typed.flag("json"):
        say_json(to_builtins(summary))
    else:
        first, *others = summary_lines(summary, record.plan)
        say(paint(first, "green" if summary.is_whole else "red"), *others)
    if summary.is_whole:
        return 0
    sys.stdout.flush()
    note(f"gpuyard: to retry the runs that did not succeed:\n  {_resume_command(record.plan, typed)}")
    return EXIT_FAULT
