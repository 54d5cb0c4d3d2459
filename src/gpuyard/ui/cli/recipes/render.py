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
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import click
from msgspec import to_builtins

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.recipes.render.follow_run import Follower, StatusFile
from gpuyard.recipes.render.load_function import RENDERER, find_function
from gpuyard.recipes.render.manifest import Manifest
from gpuyard.residency.memory.open_memory import need_numpy
from gpuyard.residency.planning.assets import DEFAULT_WORKERS
from gpuyard.residency.running.output_folders import SkipsUnwritten, check_outputs
from gpuyard.residency.running.status_file import RenderReport
from gpuyard.ui.cli import EXIT_FAULT
from gpuyard.ui.cli.recipes import render_options
from gpuyard.ui.cli.recipes.redirect_output import discard, forgiving_errors, reserve_stdout
from gpuyard.ui.cli.recipes.render_profile import profile_command
from gpuyard.ui.cli.rich_output import absolute, json_option
from gpuyard.ui.cli.terminal import is_terminal, note, paint, say, say_json
from gpuyard.ui.cli.text_table import clean

if TYPE_CHECKING:
    from gpuyard.residency.running.coordinator import Coordinator

_NOTE_WAIT_AFTER_S = 4.0  # longer than the initialisation of CUDA
_SHOW_CURSOR = b"\x1b[?25h\r\n"


class _Render(click.Command):
    """Runs `profile_command` if the first argument is `profile`."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args[:1] == ["profile"]:
            return profile_command.make_context(f"{info_name} profile", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command("render", cls=_Render)
@render_options.manifest_argument
@click.option("--renderer", required=True, metavar="MOD:FN", help="Called as FN(scene, frames, label, out_dir).")
@render_options.size_option("vram-budget", "VRAM to use, such as 44G. [80% of free VRAM]")
@render_options.size_option("ram-budget", "RAM to cache assets in, such as 90G. [half of available RAM]")
@render_options.size_option("actor-budget", "Part of the VRAM that actors may take. [what scenes leave free]")
@render_options.size_option("working-memory", "VRAM that the renderer itself uses. [measured]", may_be_none=True)
@render_options.whole_option("scene-slots", 5, "Maximum number of scenes in VRAM.")
@render_options.whole_option("workers", DEFAULT_WORKERS, "Number of labels to render at once, each in a thread.")
@click.option("--out", default="out", show_default=True, metavar="DIR", help="Directory with a folder per label.")
@click.option("--resume", is_flag=True, help="Keep complete outputs, and render the rest.")
@click.option("--strict", is_flag=True, help="Fail if the manifest contains any error.")
@click.option(
    "--order", type=click.Choice(["chosen", "manifest"]), default="chosen", show_default=True,
    help="chosen: the order that loads the fewest bytes; manifest: the order of the file.",
)  # fmt: skip
@render_options.loader_option
@render_options.device_option
@click.option(
    "--status", metavar="FILE",
    help="Write the status to this file each second, as JSON. [DIR/status.json, after a minute]",
)  # fmt: skip
@json_option
def command(manifest: str, **typed: Any) -> int:
    """Render every label of MANIFEST, with scenes and actors cached in VRAM and RAM while they are needed.

    MANIFEST is a JSON array, or JSON Lines, of {"scene": path, "actor": path or null, "labels": [...]}. The
    output of a label, DIR/NAME, is complete or absent. A label that cannot be rendered becomes a line of
    DIR/skipped.jsonl, and the others continue.

    \b
    gpuyard render manifest.json --renderer my_pkg.render:render_label --vram-budget 44G --ram-budget 90G
    gpuyard render manifest.json --renderer my_pkg.render:render_label --resume
    gpuyard render profile manifest.json    recommends budgets; see `gpuyard render profile --help`

    Exit status 0 if every label is rendered, 1 if some were skipped.
    """
    need_numpy()
    with forgiving_errors():
        with reserve_stdout(as_json=typed["as_json"]):
            ran = _run(manifest, typed)
        is_printed = _print(ran, typed)
        for fault in ran.faults:
            note(f"gpuyard: {fault}")
        if (problem := _problem(ran)) is not None:
            note(f"gpuyard: error: {problem}")
        return _exit_status(ran, is_printed=is_printed)


# Running


class _Ran(NamedTuple):
    """`signals` are those that stopped it; `faults` are files that could not be written."""

    manifest: Manifest
    report: RenderReport
    signals: list[int]
    faults: list[EnvironmentFault]


def _run(manifest: str, typed: dict[str, Any]) -> _Ran:
    render = find_function("--renderer", typed["renderer"], RENDERER)
    typed |= {"loader": render_options.make_loader(typed["loader"]), "out": absolute(typed["out"])}
    read = render_options.read_manifest(manifest, is_strict=typed["strict"])
    check_outputs(Path(typed["out"]), read.units, resume=typed["resume"])
    file = _status_file(typed)
    # A million labels live until the end: keep the garbage collector, which would stop all workers, from scanning them.
    gc.freeze()
    faults: list[EnvironmentFault] = []
    with _opened(typed) as coordinator, _running(coordinator, file) as signals:
        try:
            report = coordinator.run(read.units, render, typed["out"], resume=typed["resume"])
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
    return _Ran(manifest=read, report=report, signals=signals, faults=faults)


def _status_file(typed: dict[str, Any]) -> StatusFile | None:
    if typed["status"] is not None:
        return StatusFile(Path(absolute(typed["status"])))
    try:
        return StatusFile.default(Path(typed["out"]))
    except UserError as error:  # the file was not asked for, so rendering goes on without it
        note(f"gpuyard: no status is written: {error}; --status names another file")
        return None


@contextlib.contextmanager
def _opened(typed: dict[str, Any]) -> "Iterator[Coordinator]":
    """Open the coordinator; print a note after 4 s of waiting for the VRAM budget."""
    from gpuyard.residency.running.coordinator import Coordinator

    vram, ram = render_options.choose_budgets(typed["vram_budget"], typed["ram_budget"], typed["device"])
    coordinator = Coordinator(
        vram=vram.mb,
        ram=ram.mb,
        scene_slots=typed["scene_slots"],
        workers=typed["workers"],
        device=typed["device"],
        loader=typed["loader"],
        order=typed["order"],
        working=typed["working_memory"],
        actor_budget=typed["actor_budget"],
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
    if sys.__stderr__ is not None and is_terminal(sys.__stderr__):
        with contextlib.suppress(OSError):  # the terminal may be gone
            os.write(sys.__stderr__.fileno(), _SHOW_CURSOR)
    os._exit(128 + signum)


# Results


def _print(ran: _Ran, typed: dict[str, Any]) -> bool:
    """Print the result; return False if standard output is closed."""
    from gpuyard.ui.views.render_view import summary_lines

    try:
        if typed["as_json"]:
            say_json({"out": typed["out"], **to_builtins(ran.report), "bad": to_builtins(ran.manifest.bad)})
        else:
            first, *others = summary_lines(ran.report, ran.manifest.bad, typed["out"])
            say(paint(first, "red" if _is_incomplete(ran) else "green"), *others)
        sys.stdout.flush()
    except OSError:
        discard(sys.stdout.fileno())
        return False
    return True


def _problem(ran: _Ran) -> str | None:
    """Return the first error, on one line: the job's reason if this is a job (`core/job/error_line.py`)."""
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
