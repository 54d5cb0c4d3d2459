"""The progress of a render: labels done, memory in use, and what workers wait for.

A live display on standard error, or a line now and then without a terminal.
"""

import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Protocol, Self

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gpuyard.core.units import format_bytes, format_count, format_duration
from gpuyard.residency.running.status_file import RenderStatus, TierStatus
from gpuyard.ui.cli.terminal import is_terminal, note

_PRINT_EVERY_S = 10.0
_RECENT_S = 30.0
_BAR_WIDTH = 16
_WAITS = {
    "disk": "the disk",
    "upload": "an upload",
    "slot": "a scene slot",
    "vram": "free VRAM",
    "ram": "free RAM",
}


class RenderRate:
    """Labels per second over the last 30 s."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def note(self, status: RenderStatus) -> float | None:
        self._seen.append((status.elapsed_s, status.rendered))
        while len(self._seen) > 2 and self._seen[1][0] <= status.elapsed_s - _RECENT_S:
            self._seen.popleft()
        (since, before), (now, rendered) = self._seen[0], self._seen[-1]
        return (rendered - before) / (now - since) if now > since and rendered > before else None


# As text


def done_of(status: RenderStatus) -> int:
    return status.rendered + status.already + status.skipped


def counts_of(status: RenderStatus, pace: float | None) -> Iterator[tuple[str, str]]:
    """Yield each count with its style, without those that are 0."""
    if status.already:
        yield f"{status.already:,} existed", "dim"
    if status.skipped:
        yield f"{status.skipped:,} skipped", "red"
    if pace is not None:
        yield f"{pace:.1f} labels/s" if pace >= 1 else f"{60 * pace:.1f} labels/min", "default"
    left = (
        "" if status.left_s is None or status.state != "running" else f", about {format_duration(status.left_s)} left"
    )
    yield f"{format_duration(status.elapsed_s)}{left}", "dim"


def _tiers(status: RenderStatus) -> Iterator[tuple[str, TierStatus]]:
    yield "VRAM", status.vram
    yield "RAM", status.ram


def _used(tier: TierStatus) -> int:
    """Return the bytes in use, including memory that the renderer itself allocates."""
    return max(tier.assets, tier.allocator or 0)


def tier_text(tier: TierStatus) -> str:
    """Return `31.2 GB of 44 GB`."""
    return f"{format_bytes(_used(tier))} of {format_bytes(tier.budget)}"


def assets_of(status: RenderStatus) -> str:
    requests = status.counts.vram_hits + status.counts.ram_hits + status.counts.misses
    found = f", {100 * status.counts.vram_hits // requests}% of requests found in VRAM" if requests else ""
    scenes = f"{len(status.scenes)} of {format_count(status.scene_slots, 'scene slot')} in use"
    return f"{scenes}, {format_count(len(status.actors), 'actor')} in VRAM{found}"


def waits_of(status: RenderStatus) -> str | None:
    """Return what workers wait for, or None if none waits."""
    causes = Counter(worker.waits_for or "upload" for worker in status.workers if worker.doing == "waiting")
    if not causes:
        return None
    waits = ", ".join(f"{count} for {_WAITS.get(cause, cause)}" for cause, count in causes.most_common())
    return f"{causes.total()} of {format_count(len(status.workers), 'worker')} waiting: {waits}"


def line_of(status: RenderStatus, pace: float | None) -> str:
    counts = ", ".join(text for text, _ in counts_of(status, pace))
    memory = ", ".join(f"{name} {tier_text(tier)}" for name, tier in _tiers(status))
    waits = waits_of(status)
    parts = [f"{done_of(status):,} of {status.labels:,} labels, {counts}", memory, assets_of(status)]
    return f"gpuyard: {'; '.join([*parts, waits] if waits else parts)}"


# As a live display


def picture_of(status: RenderStatus, pace: float | None) -> RenderableType:
    waits = waits_of(status)
    return Group(
        _head(status),
        Text("   ", no_wrap=True, overflow="ellipsis").join(Text(*fact) for fact in counts_of(status, pace)),
        _memory(status),
        Text(assets_of(status), no_wrap=True, overflow="ellipsis"),
        Text(waits or "no worker is waiting", style="yellow" if waits else "dim", no_wrap=True, overflow="ellipsis"),
    )


def _head(status: RenderStatus) -> Table:
    head = Table.grid(padding=(0, 2, 0, 0), expand=True)
    head.add_column(ratio=1)
    head.add_column(no_wrap=True, justify="right")
    bar = _bar(done_of(status), status.labels, "red" if status.skipped else "green")
    head.add_row(bar, Text(f"{done_of(status):,} of {status.labels:,} labels"))
    return head


def _memory(status: RenderStatus) -> Columns:
    """Return both tiers side by side, or below each other on a narrow terminal; bars shrink first."""
    return Columns([_tier(name, tier) for name, tier in _tiers(status)], padding=(0, 2))


def _tier(name: str, tier: TierStatus) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, min_width=len("VRAM"))
    grid.add_column()
    grid.add_column(no_wrap=True)
    grid.add_row(name, _bar(_used(tier), tier.budget, "cyan", _BAR_WIDTH), tier_text(tier))
    return grid


def _bar(completed: int, total: int, style: str, width: int | None = None) -> ProgressBar:
    return ProgressBar(
        total=max(1, total),
        completed=completed,
        width=width,
        complete_style=style,
        finished_style=style,
        style="dim",
    )


# Where it is shown


class RenderScreen(Protocol):
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def show(self, status: RenderStatus) -> None: ...
    def note(self, text: str) -> None: ...


class _LiveScreen:
    def __init__(self) -> None:
        # Output of a renderer goes above the display, unless standard output is a pipe or a file.
        self._live = Live(
            console=Console(stderr=True, highlight=False),
            auto_refresh=False,
            transient=True,
            redirect_stdout=is_terminal(sys.stdout),
        )
        self._pace = RenderRate()

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, status: RenderStatus) -> None:
        self._live.update(picture_of(status, self._pace.note(status)), refresh=True)

    def note(self, text: str) -> None:
        self._live.console.print(Text(text))


class PlainRenderScreen:
    """Prints a line every 10 s."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._printed_at = now()
        self._pace = RenderRate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def show(self, status: RenderStatus) -> None:
        pace = self._pace.note(status)
        if self._now() >= self._printed_at + _PRINT_EVERY_S:
            self._printed_at = self._now()
            note(line_of(status, pace))

    def note(self, text: str) -> None:
        note(text)


def screen() -> RenderScreen:
    return _LiveScreen() if is_terminal(sys.stderr) else PlainRenderScreen()
