"""The progress of a batch: how many runs are done, and what the next one waits for.

A live display on standard error, or a line now and then without a terminal. All figures are the daemon's, including its
clock, so a batch that is followed again later is shown as if it had been followed all the time.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime
from types import TracebackType
from typing import Any, Protocol, Self

from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gpuyard.connect.retrying import RetryingClient
from gpuyard.core.job.lifecycle import LIVE
from gpuyard.core.units import format_duration
from gpuyard.recipes.batch.plan import BatchPart
from gpuyard.ui.cli.terminal import is_terminal, note
from gpuyard.ui.cli.text_table import clean
from gpuyard.ui.views.live_display import LiveDisplay

_POLL_S = 0.5
_PRINT_EVERY_S = 5.0
_RECENT_RUNS = 20
_LONGEST_NAME = 24
_BOUNDS = frozenset({"cpu", "memory", "gpu", "gpu-memory"})


class Progress(Struct, frozen=True, kw_only=True):
    """`gate` is the limit that the next run waits for, and `held_by` names it with its figure; `left_s` is the
    estimated time left, or None."""

    name: str
    total: int
    succeeded: int
    failed: int
    cancelled: int
    running: int
    gate: str | None
    held_by: str | None
    elapsed_s: float
    held: int = 0
    left_s: float | None = None

    @property
    def finished(self) -> int:
        return self.succeeded + self.failed + self.cancelled

    @property
    def waiting(self) -> int:
        return self.total - self.finished - self.running


class TimeLeft:
    """Estimates the time left from the pace of the most recent runs."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()
        self._most_at_once = 1

    def note(self, now: float, finished: int, running: int) -> None:
        self._most_at_once = max(self._most_at_once, running)
        if not self._seen or finished != self._seen[-1][1]:
            self._seen.append((now, finished))
        recent = max(_RECENT_RUNS, 2 * self._most_at_once)
        while len(self._seen) > 2 and finished - self._seen[1][1] >= recent:
            self._seen.popleft()

    def left_s(self, now: float, rest: int) -> float | None:
        """Return None until as many runs have finished as run at once: the first ones say little about the rest."""
        if not self._seen:
            return None
        since, before = self._seen[0]
        finished = self._seen[-1][1] - before
        if finished < self._most_at_once or now <= since:
            return None
        return rest * (now - since) / finished


def progress_of(name: str, status: dict[str, Any], submitted_at: str) -> Progress:
    counts: dict[str, int] = status["counts"]
    failed = counts.get("failed", 0) + counts.get("rejected", 0)
    held_by, device = status["held_by"], status["device"]
    if held_by is not None and device is not None:
        index = status["device_index"]
        held_by = f"{held_by} on {device if index is None else f'GPU {index}'}"
    return Progress(
        name=name,
        total=status["count"],
        succeeded=counts.get("succeeded", 0),
        failed=failed,
        cancelled=counts.get("cancelled", 0),
        running=sum(counts.get(state, 0) for state in LIVE),
        gate=status["gate"],
        held_by=held_by,
        held=counts.get("held", 0),
        elapsed_s=max(0.0, _moment(status["now"]) - _moment(submitted_at)),
    )


def _moment(iso: str) -> float:
    return datetime.fromisoformat(iso).timestamp()


# As text


def counts_of(progress: Progress) -> Iterator[tuple[str, str]]:
    """Yield each count with its style; failed and cancelled only if there are any."""
    yield f"{progress.running:,} running", "cyan" if progress.running else "dim"
    yield f"{progress.waiting:,} waiting", "default" if progress.waiting else "dim"
    if progress.failed:
        yield f"{progress.failed:,} failed", "red"
    if progress.cancelled:
        yield f"{progress.cancelled:,} cancelled", "yellow"


def time_of(progress: Progress) -> str:
    left = "" if progress.left_s is None else f", about {format_duration(progress.left_s)} left"
    return f"{format_duration(progress.elapsed_s)}{left}"


def hold_of(progress: Progress) -> str:
    """Return what the next run waits for."""
    if not progress.waiting and progress.running:
        return "the last runs are running"
    if progress.finished == progress.total and progress.gate != "pause":
        return "all runs have finished; summing up"
    if progress.held and progress.held == progress.waiting:
        return "held by the user: `gpuyard release` lets them start"
    if progress.held_by is None or progress.gate is None:
        return "the next run is about to start"
    if progress.gate == "concurrency":
        return "at the limit of --concurrency"
    before = "limited by " if progress.gate in _BOUNDS else "waits for a GPU: " if progress.gate == "room" else ""
    return f"{before}{clean(progress.held_by)}"


def line_of(progress: Progress) -> str:
    counts = ", ".join(text for text, _ in counts_of(progress))
    done = f"{progress.finished:,} of {progress.total:,} done"
    return f"gpuyard: {done}, {counts}; {hold_of(progress)}; {time_of(progress)}"


def picture_of(progress: Progress) -> RenderableType:
    head = Table.grid(padding=(0, 2, 0, 0), expand=True)
    head.add_column(no_wrap=True, overflow="ellipsis", max_width=_LONGEST_NAME)
    head.add_column(ratio=1)
    head.add_column(no_wrap=True, justify="right")
    style = "red" if progress.failed else "green"
    bar = ProgressBar(
        total=progress.total, completed=progress.finished, complete_style=style, finished_style=style, style="dim"
    )
    head.add_row(Text(progress.name, style="bold"), bar, Text(f"{progress.finished:,} of {progress.total:,} done"))
    counts = Text("   ", no_wrap=True, overflow="ellipsis").join(Text(*fact) for fact in counts_of(progress))
    counts.append(f"   {time_of(progress)}", style="dim")
    return Group(head, counts, Text(hold_of(progress), style=_hold_style(progress), no_wrap=True, overflow="ellipsis"))


def _hold_style(progress: Progress) -> str:
    """Highlight limits other than --concurrency and --stagger, which hold runs back in normal operation."""
    is_held = progress.waiting and progress.gate not in (None, "concurrency", "stagger")
    return "yellow" if is_held else "dim"


# Where it is shown


class BatchScreen(Protocol):
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def show(self, progress: Progress) -> None: ...
    def note(self, text: str) -> None: ...


class LiveBatchScreen(LiveDisplay):
    def __init__(self) -> None:
        # Live must not redirect standard error: after an interrupt it would swallow the question to the user.
        out = Console(stderr=True, highlight=False)
        super().__init__(Live(console=out, auto_refresh=False, transient=True, redirect_stderr=False))

    def show(self, progress: Progress) -> None:
        self.draw(picture_of(progress))


class PlainBatchScreen:
    """Prints a line when a count or the gate has changed, at most every 5 s."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._printed: object = None
        self._printed_at = float("-inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def show(self, progress: Progress) -> None:
        facts = (progress.succeeded, progress.failed, progress.cancelled, progress.running, progress.gate)
        if facts != self._printed and self._now() >= self._printed_at + _PRINT_EVERY_S:
            self._printed, self._printed_at = facts, self._now()
            note(line_of(progress))

    def note(self, text: str) -> None:
        note(text)


def follow(name: str, part: BatchPart) -> dict[str, Any]:
    """Show the progress until the end, and return the job that sums up. KeyboardInterrupt restores the terminal."""
    estimate, noted = TimeLeft(), set[str]()
    screen: BatchScreen = LiveBatchScreen() if is_terminal(sys.stderr) else PlainBatchScreen()
    with RetryingClient() as queue, screen:
        submitted_at = queue.get(f"/jobs/{part.first}")["submitted_at"]
        while True:
            status = queue.get(f"/batches/{part.first}")
            for limit in status["unknown"]:
                if limit not in noted:
                    noted.add(limit)
                    screen.note(f"gpuyard: {limit} is not enforced: no probe measures it")
            screen.show(_with_time_left(progress_of(name, status, submitted_at), estimate))
            query = {"ids": str(part.finish), "timeout": f"{_POLL_S}"}
            if queue.get("/wait", query, _POLL_S)["done"]:
                return queue.get(f"/jobs/{part.finish}")


def _with_time_left(progress: Progress, estimate: TimeLeft) -> Progress:
    estimate.note(progress.elapsed_s, progress.finished, progress.running)
    rest = progress.total - progress.finished
    return replace(progress, left_s=estimate.left_s(progress.elapsed_s, rest) if rest else None)
