"""`gpuyard workspace status`: once, or with --watch until the end: live on a terminal, a line per change in a pipe."""

import signal
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from gpuyard.connect.retrying import RetryingClient
from gpuyard.recipes.workspace.sweep_status import SweepStatus, read_sweep_status
from gpuyard.ui.cli import EXIT_FAULT
from gpuyard.ui.cli.rich_output import console
from gpuyard.ui.cli.terminal import is_terminal, is_unicode, say, say_lines, terminal_size
from gpuyard.ui.views.workspace_table import TableSize, changes_of, picture_of, summary_of

if TYPE_CHECKING:
    from gpuyard.recipes.workspace.settings import LoadedSettings

_POLL_S = 1.0


def show(loaded: "LoadedSettings") -> None:
    """Print all lines, however many: the most important ones are at the end."""
    with RetryingClient() as queue:
        status = read_sweep_status(loaded, queue)
    say_lines(picture_of(status, _frame(terminal_size()[0])))


def status_as_json(loaded: "LoadedSettings") -> dict[str, Any]:
    from msgspec import to_builtins

    with RetryingClient() as queue:
        status = read_sweep_status(loaded, queue)
    counts = {
        name: getattr(status, name) for name in ("total", "completed", "running", "waiting", "failed", "not_started")
    }
    return {
        "workspace": status.workspace,
        "task_name": status.task_name,
        "tag": status.tag,
        "counts": counts,
        "over": status.is_over,
        "stopped": status.is_stopped,
        "paused": status.is_paused,
        "left_s": status.left_s,
        "why": status.why,
        "notes": list(status.notes),
        "tasks": to_builtins(status.rows),
    }


def watch(loaded: "LoadedSettings") -> int:
    """Show the status until the end, and return the exit status. Ctrl-C leaves the last status on the screen."""
    # SIGTERM must not leave the terminal with a hidden cursor.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    show_all = _show_in_place if is_terminal(sys.stdout) else _print_changes
    try:
        last = show_all(_statuses(loaded))
    except KeyboardInterrupt:
        return 0  # Ctrl-C is the normal end
    return EXIT_FAULT if last.failed else 0


def _statuses(loaded: "LoadedSettings") -> Iterator[SweepStatus]:
    with RetryingClient() as queue:
        while True:
            status = read_sweep_status(loaded, queue)
            yield status
            if status.is_over:
                return
            time.sleep(_POLL_S)


def _show_in_place(statuses: Iterator[SweepStatus]) -> SweepStatus:
    from rich.live import Live

    from gpuyard.ui.views.live_display import LiveDisplay

    out = console()
    frame = _frame()  # before Live replaces standard output, which hides the terminal's encoding
    with LiveDisplay(Live(console=out, auto_refresh=False, vertical_overflow="crop")) as shown:
        for status in statuses:
            # The last status stays on the screen and may be higher than the screen.
            lines = None if status.is_over else out.height
            shown.draw_lines(picture_of(status, replace(frame, columns=out.width, lines=lines)))
    return status


def _print_changes(statuses: Iterator[SweepStatus]) -> SweepStatus:
    before: SweepStatus | None = None
    for status in statuses:
        changes = [] if before is None else changes_of(before, status)
        if before is None or changes or (status.is_over and not before.is_over):
            details = f": {', '.join(changes)}" if changes else ""
            say(f"{summary_of(status, _frame())}{details}")
            sys.stdout.flush()
        before = status
    assert before is not None
    return before


def _frame(columns: int | None = None) -> TableSize:
    return TableSize(columns=columns, is_unicode=is_unicode(), has_symbols=is_terminal(sys.stdout))
