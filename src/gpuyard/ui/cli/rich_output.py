"""Options and output that click commands share."""

import io
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpuyard.core.units import parse_duration
from gpuyard.errors import UserError
from gpuyard.ui.cli.terminal import is_unicode, terminal_size

if TYPE_CHECKING:
    from rich.console import Console

    from gpuyard.core.snapshot import Snapshot
    from gpuyard.ui.views import Frame

F = TypeVar("F", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON with stable keys.")


def seconds(name: str, default: str | None, least: float, text: str) -> Callable[[F], F]:
    """Return an option that takes a duration, such as `--interval 500ms`, and passes it on in seconds."""

    def check(_: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
        if value is not None and value < least:
            raise UserError(f"{parameter.opts[0]} is too short", hint=f"give it at least {least:g} s")
        return value

    return click.option(
        f"--{name}", f"{name}_s", type=parse_duration, default=default, show_default=default is not None,
        callback=check, metavar="TIME", help=text,
    )  # fmt: skip


deadline_option = seconds("deadline", "2s", 0.1, "Time limit for the probes.")


def absolute(path: str) -> str:
    if not path:
        raise UserError("a path is empty", hint="name a folder, or leave the option out")
    try:
        return os.path.abspath(path)
    except FileNotFoundError:
        raise UserError("the current directory no longer exists", hint="change to another one") from None


def console() -> "Console":
    """Return a console for live displays. Characters that the terminal's encoding lacks become question marks."""
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    return Console(highlight=False, soft_wrap=False)


def frame() -> "Frame":
    """Return the frame of standard output for views that are lines."""
    from gpuyard.ui.views import Frame

    return Frame(width=terminal_size()[0], is_unicode=is_unicode())


def pids_of(snapshot: "Snapshot") -> set[int]:
    return {process.pid for device in snapshot.devices for process in device.processes or ()}
