"""`gpuyard workspace status`: once, or until all is over; in place on a terminal, elsewhere a line for each change."""

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

_LOOK_EVERY_S = 1.0


def show(loaded: "LoadedSettings") -> None:
    """All of it, however long: what matters most is at the end."""
    with RetryingClient() as queue:
        standing = read_sweep_status(loaded, queue)
    say_lines(picture_of(standing, _frame(terminal_size()[0])))


def shown_as_json(loaded: "LoadedSettings") -> dict[str, Any]:
    from msgspec import to_builtins

    with RetryingClient() as queue:
        standing = read_sweep_status(loaded, queue)
    counts = {
        name: getattr(standing, name) for name in ("total", "completed", "running", "waiting", "failed", "not_started")
    }
    return {
        "workspace": standing.workspace,
        "task_name": standing.task_name,
        "tag": standing.tag,
        "counts": counts,
        "over": standing.is_over,
        "stopped": standing.is_stopped,
        "paused": standing.is_paused,
        "left_s": standing.left_s,
        "why": standing.why,
        "notes": list(standing.notes),
        "tasks": to_builtins(standing.rows),
    }


def watch(loaded: "LoadedSettings") -> int:
    """The exit status. Whoever no longer wants to see it has what was shown last."""
    # What ends us must not leave the terminal without its cursor.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    show_all = _show_in_place if is_terminal(sys.stdout) else _print_changes
    try:
        last = show_all(_standings(loaded))
    except KeyboardInterrupt:
        return 0  # the way to end a watch
    return EXIT_FAULT if last.failed else 0


def _standings(loaded: "LoadedSettings") -> Iterator[SweepStatus]:
    with RetryingClient() as queue:
        while True:
            standing = read_sweep_status(loaded, queue)
            yield standing
            if standing.is_over:
                return
            time.sleep(_LOOK_EVERY_S)


def _show_in_place(standings: Iterator[SweepStatus]) -> SweepStatus:
    from rich.live import Live

    from gpuyard.ui.views.live_display import LiveDisplay

    out = console()
    frame = _frame()  # before the output is Live's, which knows nothing of the terminal's encoding
    with LiveDisplay(Live(console=out, auto_refresh=False, vertical_overflow="crop")) as shown:
        for standing in standings:
            # The last one stays on the screen, and may be longer than that is high.
            lines = None if standing.is_over else out.height
            shown.draw_lines(picture_of(standing, replace(frame, columns=out.width, lines=lines)))
    return standing


def _print_changes(standings: Iterator[SweepStatus]) -> SweepStatus:
    before: SweepStatus | None = None
    for standing in standings:
        changes = [] if before is None else changes_of(before, standing)
        if before is None or changes or (standing.is_over and not before.is_over):
            told = f": {', '.join(changes)}" if changes else ""
            say(f"{summary_of(standing, _frame())}{told}")
            sys.stdout.flush()
        before = standing
    assert before is not None
    return before


def _frame(columns: int | None = None) -> TableSize:
    return TableSize(columns=columns, is_unicode=is_unicode(), has_symbols=is_terminal(sys.stdout))
