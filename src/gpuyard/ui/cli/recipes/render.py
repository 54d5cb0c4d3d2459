"""`gpuyard render`: a manifest becomes outputs, in one process that keeps the right assets in VRAM and RAM.

`gpuyard render profile` is a command of its own; a manifest of that name is written `./profile`.
"""

import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import click

from gpuyard.ui.cli import EXIT_FAULT
from gpuyard.ui.cli.recipes.batch_options import absolute
from gpuyard.ui.cli.recipes.redirect_output import forgiving_errors, lose, only_the_answer
from gpuyard.ui.cli.recipes.render_options import (
    budgets_of,
    device_option,
    loader_of,
    loader_option,
    manifest_argument,
    read_manifest,
    size_option,
    whole_option,
)
from gpuyard.ui.cli.recipes.render_profile import profile_command
from gpuyard.ui.cli.rich_output import json_option
from gpuyard.ui.cli.terminal import is_terminal, note, paint, say, say_json

if TYPE_CHECKING:
    from gpuyard.errors import EnvironmentFault
    from gpuyard.recipes.render.follow_run import StatusFile
    from gpuyard.recipes.render.manifest import Manifest
    from gpuyard.residency.running.coordinator import Coordinator
    from gpuyard.residency.running.status_file import RenderReport

_WAIT_IN_SILENCE_S = 4.0  # longer than it takes to set CUDA up
_SHOW_CURSOR = b"\x1b[?25h\r\n"


class _Render(click.Command):
    """One word makes it another command."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args[:1] == ["profile"]:
            return profile_command.make_context(f"{info_name} profile", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command("render", cls=_Render)
@manifest_argument
@click.option("--renderer", required=True, metavar="MOD:FN", help="Called as FN(scene, frames, label, out_dir).")
@size_option("vram-budget", "How much VRAM to use, such as 44G. [80% of what is free]")
@size_option("ram-budget", "How much RAM to keep assets in, such as 90G. [half of what is available]")
@size_option("working-memory", "What of VRAM is the renderer's own. [as much as it is seen to use]", may_be_none=True)
@whole_option("scene-slots", 5, "At most so many scenes in VRAM.")
@whole_option("workers", 4, "How many labels are rendered at once, each by a thread.")
@click.option("--out", default="out", show_default=True, metavar="DIR", help="Each label gets a folder in it.")
@click.option("--resume", is_flag=True, help="Keep outputs that are complete, and render the rest.")
@click.option("--strict", is_flag=True, help="Do nothing where the manifest is not right in all places.")
@click.option(
    "--order", type=click.Choice(["chosen", "manifest"]), default="chosen", show_default=True,
    help="Chosen so that what is loaded is used as long as possible, or as the manifest has it.",
)  # fmt: skip
@loader_option
@device_option
@click.option(
    "--status", metavar="FILE",
    help="Write how it stands to this file, each second, as JSON. [after a minute, to DIR/status.json]",
)  # fmt: skip
@json_option
def command(manifest: str, **typed: Any) -> int:
    """Render every label of MANIFEST, keeping scenes and actors in VRAM and RAM as long as they are needed.

    MANIFEST is a JSON array, or JSON Lines, of {"scene": path, "actor": path or null, "labels": [...]}. A label's
    output is there as a whole or not at all, as DIR/NAME. One that cannot be rendered is a line of DIR/skipped.jsonl,
    and the rest goes on.

    \b
    gpuyard render manifest.json --renderer my_pkg.render:render_label --vram-budget 44G --ram-budget 90G
    gpuyard render manifest.json --renderer my_pkg.render:render_label --resume
    gpuyard render profile manifest.json    what the budgets should be; see `gpuyard render profile --help`

    Exit status 0 where every label is rendered, 1 where some were skipped.
    """
    from gpuyard.residency.memory.open_memory import need_numpy

    need_numpy()
    with forgiving_errors():
        with only_the_answer(as_json=typed["as_json"]):
            ran = _run(manifest, typed)
        is_told = _tell(ran, typed)
        for fault in ran.faults:
            note(f"gpuyard: {fault}")
        return _exit_status(ran, is_told=is_told)


# Running it


class _Ran(NamedTuple):
    """`heard` are the signals that it was told to stop by; `faults` is what could not be written down."""

    manifest: "Manifest"
    report: "RenderReport"
    heard: list[int]
    faults: "list[EnvironmentFault]"


def _run(manifest: str, typed: dict[str, Any]) -> _Ran:
    from gpuyard.recipes.render.load_function import RENDERER, find_function
    from gpuyard.residency.running.output_folders import check_outputs

    render = find_function("--renderer", typed["renderer"], RENDERER)
    typed |= {"loader": loader_of(typed["loader"]), "out": absolute(typed["out"])}
    read = read_manifest(manifest, is_strict=typed["strict"])
    check_outputs(Path(typed["out"]), read.units, resume=typed["resume"])
    file = _status_file(typed)
    # They stay to the end: looking through a million labels for garbage would hold up all workers.
    gc.freeze()
    faults: list[EnvironmentFault] = []
    with _opened(typed) as coordinator, _running(coordinator, file) as heard:
        report = _report(
            coordinator, lambda: coordinator.run(read.units, render, typed["out"], resume=typed["resume"]), faults
        )
    _write_last(file, report, faults)
    return _Ran(manifest=read, report=report, heard=heard, faults=faults)


def _status_file(typed: dict[str, Any]) -> "StatusFile | None":
    from gpuyard.errors import UserError
    from gpuyard.recipes.render.follow_run import StatusFile

    if typed["status"] is not None:
        return StatusFile(Path(absolute(typed["status"])))
    try:
        return StatusFile.unasked(Path(typed["out"]))
    except UserError as error:  # the file was not asked for, so rendering goes on without it
        note(f"gpuyard: no status is written: {error}; --status names another file")
        return None


def _report(
    coordinator: "Coordinator", run: Callable[[], "RenderReport"], faults: "list[EnvironmentFault]"
) -> "RenderReport":
    """Also where the disk had no room for all of `skipped.jsonl`."""
    from gpuyard.residency.running.output_folders import SkipsUnwritten
    from gpuyard.residency.running.status_file import RenderReport

    try:
        return run()
    except SkipsUnwritten as fault:
        faults.append(fault)
        status = coordinator.status()
        assert status is not None
        return RenderReport(status=status, skipped=fault.skipped)


def _write_last(file: "StatusFile | None", report: "RenderReport", faults: "list[EnvironmentFault]") -> None:
    from gpuyard.errors import EnvironmentFault

    if file is not None:
        try:
            file.write(report.status)
        except EnvironmentFault as fault:
            faults.append(fault)


@contextlib.contextmanager
def _opened(typed: dict[str, Any]) -> "Iterator[Coordinator]":
    """Says so where the budget cannot be had at once."""
    from gpuyard.residency.running.coordinator import Coordinator

    vram, ram = budgets_of(typed["vram_budget"], typed["ram_budget"], typed["device"])
    coordinator = Coordinator(
        vram=vram.mb,
        ram=ram.mb,
        scene_slots=typed["scene_slots"],
        workers=typed["workers"],
        device=typed["device"],
        loader=typed["loader"],
        order=typed["order"],
        working=typed["working_memory"],
    )
    waits = f"gpuyard: waits until {vram.text()} can be had on a device; `gpuyard leases` shows who holds what"
    timer = threading.Timer(_WAIT_IN_SILENCE_S, note, [waits])
    timer.start()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(coordinator)
        finally:
            timer.cancel()
        yield coordinator


@contextlib.contextmanager
def _running(coordinator: "Coordinator", file: "StatusFile | None") -> Iterator[list[int]]:
    """Shown and written down while it goes on; the signals that it was told to stop by."""
    from gpuyard.recipes.render.follow_run import Follower
    from gpuyard.ui.views.render_progress import screen

    heard: list[int] = []
    stops = "gpuyard: stops when the labels in hand are done; Ctrl-C once more ends it at once"
    with screen() as shown, Follower(coordinator, shown.show, file, lambda: shown.note(stops)) as follower:

        def hear(signum: int, _: object) -> None:
            if heard:
                follower.give_up()
                _end_at_once(signum)
            heard.append(signum)
            follower.stop()

        with _signals(hear):
            yield heard


@contextlib.contextmanager
def _signals(hear: Callable[[int, object], None]) -> Iterator[None]:
    """What was ignored stays ignored."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    for signum, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(signum, hear)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _end_at_once(signum: int) -> NoReturn:
    """Renderers are not waited for; what they have not finished is under `.partial`, and of no use to anybody."""
    if sys.__stderr__ is not None and is_terminal(sys.__stderr__):
        with contextlib.suppress(OSError):  # it may have gone
            os.write(sys.__stderr__.fileno(), _SHOW_CURSOR)
    os._exit(128 + signum)


# What came of it


def _tell(ran: _Ran, typed: dict[str, Any]) -> bool:
    """Whether there was somebody to tell it to."""
    try:
        if typed["as_json"]:
            _say_json(ran, typed["out"])
        else:
            _say_summary(ran, typed["out"])
        sys.stdout.flush()
    except OSError:
        lose(sys.stdout.fileno())
        return False
    return True


def _say_json(ran: _Ran, out: str) -> None:
    from msgspec import to_builtins

    say_json({"out": out, **to_builtins(ran.report), "bad": to_builtins(ran.manifest.bad)})


def _say_summary(ran: _Ran, out: str) -> None:
    from gpuyard.ui.views.render_summary import summary_lines

    first, *others = summary_lines(ran.report, ran.manifest.bad, out)
    say(paint(first, "red" if _is_short(ran) else "green"))
    for line in others:
        say(line)


def _is_short(ran: _Ran) -> bool:
    return bool(ran.report.skipped or ran.manifest.bad or ran.report.status.state == "interrupted")


def _exit_status(ran: _Ran, *, is_told: bool) -> int:
    if ran.report.status.state == "interrupted" and ran.heard:
        note("gpuyard: to go on with what is left, type the same with --resume")
        return 128 + ran.heard[0]
    return EXIT_FAULT if _is_short(ran) or ran.faults or not is_told else 0
