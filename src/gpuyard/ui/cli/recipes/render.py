"""`gpuyard render`: renders a manifest in one process that caches assets in VRAM and RAM.

`gpuyard render profile` is a command of its own; for a manifest of that name, write `./profile`.
"""

import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from msgspec import to_builtins

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.model.option import Option
from gpuyard.model.option_values import Options
from gpuyard.recipes.render.follow_run import Follower, StatusFile
from gpuyard.recipes.render.load_function import RENDERER, find_function
from gpuyard.recipes.render.manifest import Manifest
from gpuyard.recipes.render.memory.leased_memory import need_numpy
from gpuyard.recipes.render.planning.assets_and_units import DEFAULT_WORKERS
from gpuyard.recipes.render.status_file import RenderReport
from gpuyard.recipes.render.write_outputs import SkipsUnwritten, check_outputs
from gpuyard.ui.cli import EXIT_FAULT
from gpuyard.ui.cli.command_grammar import JSON, Typed, Verb
from gpuyard.ui.cli.recipes import render_profile as render_options
from gpuyard.ui.cli.recipes.redirect_output import discard, forgiving_errors, reserve_stdout
from gpuyard.ui.cli.recipes.render_profile import PROFILE
from gpuyard.ui.cli.terminal import absolute, note, paint, say, say_json
from gpuyard.ui.cli.text_table import clean

if TYPE_CHECKING:
    from gpuyard.recipes.render.coordinator import Coordinator
    from gpuyard.recipes.render.memory.read_asset_files import Loader

_NOTE_WAIT_AFTER_S = 4.0  # longer than the initialisation of CUDA


VERB = Verb(
    """Render every label of MANIFEST, with scenes and actors cached in VRAM and RAM while they are needed.

    MANIFEST is a JSON array, or JSON Lines, of {"scene": path, "actor": path or null, "labels": [...]}. The
    output of a label, DIR/NAME, is complete or absent. A label that cannot be rendered becomes a line of
    DIR/skipped.jsonl, and the others continue.

    \b
    gpuyard render manifest.json --renderer my_pkg.render:render_label --vram-budget 44G --ram-budget 90G
    gpuyard render manifest.json --renderer my_pkg.render:render_label --resume
    gpuyard render profile manifest.json    recommends budgets; see `gpuyard render profile --help`

    Exit status 0 if every label is rendered, 1 if some were skipped.
    """,
    (
        Option("renderer", "text", "MOD:FN", "Called as FN(scene, frames, label, out_dir).", note="required"),
        Option("vram-budget", "size", "SIZE", "VRAM to use, such as 44G.", note="80% of free VRAM"),
        Option("ram-budget", "size", "SIZE", "RAM to cache assets in, such as 90G.", note="half of available RAM"),
        Option("actor-budget", "size", "SIZE", "Part of the VRAM that actors may take.", note="what scenes leave free"),
        Option("working-memory", "size", "SIZE", "VRAM that the renderer itself uses.", note="measured", least=0),
        Option("scene-slots", "whole", "N", "Maximum number of scenes in VRAM.", default="5", least=1),
        Option("workers", "whole", "N", "Number of labels to render at once, each in a thread.",
               default=str(DEFAULT_WORKERS), least=1),
        Option("out", "text", "DIR", "Directory with a folder per label.", default="out"),
        Option("resume", "flag", None, "Keep complete outputs, and render the rest."),
        Option("strict", "flag", None, "Fail if the manifest contains any error."),
        Option("order", "choice", "[chosen|manifest]",
               "chosen: the order that loads the fewest bytes; manifest: the order of the file.",
               choices=("chosen", "manifest"), default="chosen"),
        render_options.LOADER,
        render_options.DEVICE,
        Option("status", "text", "FILE", "Write the status to this file each second, as JSON.",
               note="DIR/status.json, after a minute"),
        JSON,
    ),
    render_options.MANIFEST,
    commands={"profile": PROFILE},
)  # fmt: skip


def run(command: Typed) -> int:
    need_numpy()
    typed = command.values()
    if typed["renderer"] is None:
        raise UserError("which renderer?", hint="give --renderer MOD:FN, such as --renderer my_pkg.render:render_label")
    with forgiving_errors():
        with reserve_stdout(as_json=typed["json"]):
            ran = _run(command.arguments[0], typed)
        is_printed = _print(ran, typed)
        for fault in ran.faults:
            note(f"gpuyard: {fault}")
        if (problem := _problem(ran)) is not None:
            note(f"gpuyard: error: {problem}")
        return _exit_status(ran, is_printed=is_printed)


# Running


class _Ran(NamedTuple):
    """`out` is the output folder; `signals` are those that stopped it; `faults` are files that could not be written."""

    manifest: Manifest
    out: str
    report: RenderReport
    signals: list[int]
    faults: list[EnvironmentFault]


def _run(manifest: str, typed: Options) -> _Ran:
    render = find_function("--renderer", typed["renderer"], RENDERER)
    loader, out = render_options.make_loader(typed["loader"]), absolute(typed["out"])
    read = render_options.read_manifest(manifest, is_strict=typed["strict"])
    check_outputs(Path(out), read.units, resume=typed["resume"])
    file = _status_file(typed, out)
    # A million labels live until the end: keep the garbage collector, which would stop all workers, from scanning them.
    gc.freeze()
    faults: list[EnvironmentFault] = []
    with _opened(typed, loader) as coordinator, _running(coordinator, file) as signals:
        try:
            report = coordinator.run(read.units, render, out, resume=typed["resume"])
        except SkipsUnwritten as fault:  # the disk was too full to write all of `skipped.jsonl`
            faults.append(fault)
            status = coordinator.status()
            assert status is not None
            report = RenderReport(status=status, skipped=fault.skipped)
    try:
        if file is not None:
            file.write(report.status)
    except EnvironmentFault as fault:
        faults.append(fault)
    return _Ran(manifest=read, out=out, report=report, signals=signals, faults=faults)


def _status_file(typed: Options, out: str) -> StatusFile | None:
    if typed["status"] is not None:
        return StatusFile(Path(absolute(typed["status"])))
    try:
        return StatusFile.default(Path(out))
    except UserError as error:  # the file was not asked for, so rendering goes on without it
        note(f"gpuyard: no status is written: {error}; --status names another file")
        return None


@contextlib.contextmanager
def _opened(typed: Options, loader: "Loader") -> "Iterator[Coordinator]":
    """Open the coordinator; print a note after 4 s of waiting for the VRAM budget."""
    from gpuyard.recipes.render.coordinator import Coordinator

    vram, ram = render_options.choose_budgets(typed["vram-budget"], typed["ram-budget"], typed["device"])
    coordinator = Coordinator(
        vram=vram.mb,
        ram=ram.mb,
        scene_slots=typed["scene-slots"],
        workers=typed["workers"],
        device=typed["device"],
        loader=loader,
        order=typed["order"],
        working=typed["working-memory"],
        actor_budget=typed["actor-budget"],
    )
    waits = f"gpuyard: waiting for {vram.text()} of VRAM on one device; `gpuyard leases` shows who holds it"
    timer = threading.Timer(_NOTE_WAIT_AFTER_S, note, [waits])
    timer.start()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(coordinator)
        finally:
            timer.cancel()
        yield coordinator


@contextlib.contextmanager
def _running(coordinator: "Coordinator", file: StatusFile | None) -> Iterator[list[int]]:
    """Show progress and write the status file meanwhile. Yield the list of signals that arrive."""
    from gpuyard.ui.views.render_view import screen

    signals: list[int] = []
    stops = "gpuyard: stopping after the current labels; press Ctrl-C again to stop at once"
    with screen() as shown, Follower(coordinator, shown.show, file, lambda: shown.note(stops)) as follower:

        def hear(signum: int, _: object) -> None:
            if signals:
                follower.abandon()
                _end_at_once(signum)
            signals.append(signum)
            follower.stop()

        before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
        for signum, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(signum, hear)
        try:
            yield signals
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)


def _end_at_once(signum: int) -> NoReturn:
    """Exit without waiting for renderers; unfinished outputs stay under `.partial`, which nothing reads."""
    os._exit(128 + signum)


# Results


def _print(ran: _Ran, typed: Options) -> bool:
    from gpuyard.ui.views.render_view import summary_lines

    try:
        if typed["json"]:
            say_json({"out": ran.out, **to_builtins(ran.report), "bad": to_builtins(ran.manifest.bad)})
        else:
            first, *others = summary_lines(ran.report, ran.manifest.bad, ran.out)
            say(paint(first, "red" if _is_incomplete(ran) else "green"), *others)
        sys.stdout.flush()
    except OSError:
        discard(sys.stdout.fileno())
        return False
    return True


def _problem(ran: _Ran) -> str | None:
    """Return the first error, on one line: the job's reason if this is a job (`model/error_line.py`)."""
    skipped, bad = ran.report.skipped, ran.manifest.bad
    if skipped:
        return clean(f"{len(skipped):,} of {ran.report.status.labels:,} labels skipped: {skipped[0].reason}")
    return clean(f"{ran.manifest.path}, {bad[0].place}: {bad[0].reason}") if bad else None


def _is_incomplete(ran: _Ran) -> bool:
    return bool(ran.report.skipped or ran.manifest.bad or ran.report.status.state == "interrupted")


def _exit_status(ran: _Ran, *, is_printed: bool) -> int:
    if ran.report.status.state == "interrupted" and ran.signals:
        note("gpuyard: run the same command with --resume to render the rest")
        return 128 + ran.signals[0]
    return EXIT_FAULT if _is_incomplete(ran) or ran.faults or not is_printed else 0
