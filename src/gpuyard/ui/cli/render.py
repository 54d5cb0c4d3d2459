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
from typing import TYPE_CHECKING, Any, NoReturn

import click

from gpuyard.ui.cli import EXIT_FAULT
from gpuyard.ui.cli.batch_options import absolute
from gpuyard.ui.cli.output import json_option
from gpuyard.ui.cli.render_options import (
    budgets_of,
    device_option,
    loader_of,
    loader_option,
    manifest_argument,
    read_manifest,
    size_option,
    whole_option,
)
from gpuyard.ui.cli.render_profile import profile_command
from gpuyard.ui.cli.terminal import is_terminal, note, paint, say, say_json

if TYPE_CHECKING:
    from gpuyard.recipes.render.following import StatusFile
    from gpuyard.recipes.render.manifest import Manifest
    from gpuyard.residency.coordinator import Coordinator
    from gpuyard.residency.status import Report

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
@click.option("--status", metavar="FILE", help="Write how it stands to this file, each second, as JSON.")
@json_option
def command(manifest: str, **typed: Any) -> int:
    """Render every label of MANIFEST, keeping scenes and actors in VRAM and RAM as long as they are needed.

    MANIFEST is a JSON array, or JSON Lines, of {"scene": path, "actor": path or null, "labels": [...]}. A label's
    output is there as a whole or not at all, as DIR/NAME. One that cannot be rendered is a line of DIR/skipped.jsonl,
    and the rest goes on.

    \b
    gpuyard render manifest.json --renderer my_pkg.render:render_label --vram-budget 44G --ram-budget 90G
    gpuyard render manifest.json --renderer my_pkg.render:render_label --resume --status status.json
    gpuyard render profile manifest.json    what the budgets should be; see `gpuyard render profile --help`

    Exit status 0 where every label is rendered, 1 where some were skipped.
    """
    from gpuyard.recipes.render.following import StatusFile
    from gpuyard.recipes.render.plugin import RENDERER, find_function
    from gpuyard.residency.devices import need_numpy
    from gpuyard.residency.outputs import check_outputs

    need_numpy()
    render = find_function("--renderer", typed["renderer"], RENDERER)
    typed |= {"loader": loader_of(typed["loader"]), "out": absolute(typed["out"])}
    read = read_manifest(manifest, is_strict=typed["strict"])
    check_outputs(Path(typed["out"]), read.units, resume=typed["resume"])
    file = None if typed["status"] is None else StatusFile(Path(absolute(typed["status"])))
    # They stay to the end: looking through a million labels for garbage would hold up all workers.
    gc.freeze()
    with _opened(typed) as coordinator, _running(coordinator, file) as interrupted:
        report = coordinator.run(read.units, render, typed["out"], resume=typed["resume"])
    _tell(report, read, typed)
    if file is not None:
        file.write(report.status)
    return _exit_status(report, read, interrupted)


# Running it


@contextlib.contextmanager
def _opened(typed: dict[str, Any]) -> "Iterator[Coordinator]":
    """Says so where the budget cannot be had at once."""
    from gpuyard.residency.coordinator import Coordinator

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
    from gpuyard.recipes.render.following import Follower
    from gpuyard.ui.render_view import screen

    heard: list[int] = []
    with screen() as shown, Follower(coordinator, shown.show, file) as follower:

        def hear(signum: int, _: object) -> None:
            if heard:
                _end_at_once(signum)
            heard.append(signum)
            follower.stop()
            shown.note("gpuyard: stops when the labels in hand are done; Ctrl-C once more ends it at once")

        with _signals(hear):
            yield heard
    if follower.problem is not None:
        note(f"gpuyard: {follower.problem}")


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
        os.write(sys.__stderr__.fileno(), _SHOW_CURSOR)
    os._exit(128 + signum)


# What came of it


def _tell(report: "Report", manifest: "Manifest", typed: dict[str, Any]) -> None:
    from msgspec import to_builtins

    from gpuyard.ui.render_summary import summary_lines

    if typed["as_json"]:
        say_json({"out": typed["out"], **to_builtins(report), "bad": to_builtins(manifest.bad)})
        return
    first, *others = summary_lines(report, manifest.bad, typed["out"])
    say(paint(first, "red" if _is_short(report, manifest) else "green"))
    for line in others:
        say(line)


def _is_short(report: "Report", manifest: "Manifest") -> bool:
    return bool(report.skipped or manifest.bad or report.status.state == "interrupted")


def _exit_status(report: "Report", manifest: "Manifest", interrupted: list[int]) -> int:
    if report.status.state == "interrupted" and interrupted:
        note("gpuyard: to go on with what is left, type the same with --resume")
        return 128 + interrupted[0]
    return EXIT_FAULT if _is_short(report, manifest) else 0
