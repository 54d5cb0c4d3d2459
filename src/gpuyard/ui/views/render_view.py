"""A render as its user sees it: the progress while it runs, on standard error, and the summary at the end."""

import contextlib
import os
from collections import Counter, deque
from collections.abc import Iterator
from functools import partial

from gpuyard.model.units import format_bytes, format_count, format_duration
from gpuyard.recipes.render.manifest import ManifestMistake
from gpuyard.recipes.render.status_file import RenderReport, RenderStatus, TierStatus
from gpuyard.ui.cli.text_table import GAP, Line, Span, clean, lay_out_facts
from gpuyard.ui.views import Frame, bar
from gpuyard.ui.views.live_display import (
    LiveDisplay,
    PlainDisplay,
    printing_above,
    progress_display,
    progress_head,
    time_text,
)

_BAR_WIDTH = 16
_MOST_SHOWN = 5
# What a worker waits for, and the same in the summary.
_WAITS = {
    "disk": ("the disk", "for the disk"),
    "upload": ("an upload", "for uploads"),
    "slot": ("a scene slot", "for a scene slot (--scene-slots)"),
    "vram": ("free VRAM", "for free VRAM (--vram-budget)"),
    "ram": ("free RAM", "for free RAM (--ram-budget)"),
}
_SKIPS = {
    "asset": "a scene or an actor cannot be read",
    "out-of-memory": "out of memory on the device, even alone",
    "too-large": "an asset is larger than the budget",
    "renderer": "the renderer failed",
    "output": "the output cannot be written",
}


class RenderRate:
    """Labels per second over the last 30 s."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def note(self, status: RenderStatus) -> float | None:
        self._seen.append((status.elapsed_s, status.rendered))
        while len(self._seen) > 2 and self._seen[1][0] <= status.elapsed_s - 30:
            self._seen.popleft()
        (since, before), (now, rendered) = self._seen[0], self._seen[-1]
        return (rendered - before) / (now - since) if now > since and rendered > before else None


def _done(status: RenderStatus) -> int:
    return status.rendered + status.already + status.skipped


def _labels(status: RenderStatus) -> str:
    return f"{_done(status):,} of {status.labels:,} labels"


def _counts(status: RenderStatus, pace: float | None) -> Iterator[Span]:
    if status.already:
        yield f"{status.already:,} existed", "dim"
    if status.skipped:
        yield f"{status.skipped:,} skipped", "red"
    if pace is not None:
        yield f"{pace:.1f} labels/s" if pace >= 1 else f"{60 * pace:.1f} labels/min", None
    yield time_text(status.elapsed_s, status.left_s if status.state == "running" else None), "dim"


def _tiers(status: RenderStatus) -> Iterator[tuple[str, TierStatus, int]]:
    """Yield the tiers with the bytes in use, including memory that the renderer itself allocates."""
    for name, tier in (("VRAM", status.vram), ("RAM", status.ram)):
        yield name, tier, max(tier.assets, tier.allocator or 0)


def _of(nbytes: int, tier: TierStatus) -> str:
    return f"{format_bytes(nbytes)} of {format_bytes(tier.budget)}"


def _assets(status: RenderStatus) -> str:
    requests = status.counts.vram_hits + status.counts.ram_hits + status.counts.misses
    found = f", {100 * status.counts.vram_hits // requests}% of requests found in VRAM" if requests else ""
    scenes = f"{len(status.scenes)} of {format_count(status.scene_slots, 'scene slot')} in use"
    return f"{scenes}, {format_count(len(status.actors), 'actor')} in VRAM{found}"


def _references(status: RenderStatus) -> str:
    left = f"left: VRAM {format_bytes(status.vram.left)}, RAM {format_bytes(status.ram.left)}"
    used = [
        f"{clean(os.path.basename(each.path.rstrip('/')))} by {format_count(each.workers, 'worker')}"
        + (f" and {format_count(each.units, 'unit')} to come" if each.units else "")
        for each in status.references
        if each.workers
    ]
    more = f" and {len(used) - _MOST_SHOWN} more" if len(used) > _MOST_SHOWN else ""
    return f"{left}; in use: {', '.join(used[:_MOST_SHOWN])}{more}" if used else left


def _waits(status: RenderStatus) -> str | None:
    causes = Counter(worker.waits_for or "upload" for worker in status.workers if worker.doing == "waiting")
    if not causes:
        return None
    waits = ", ".join(f"{count} for {_WAITS.get(cause, (cause,))[0]}" for cause, count in causes.most_common())
    return f"{causes.total()} of {format_count(len(status.workers), 'worker')} waiting: {waits}"


def line_of(status: RenderStatus, pace: float | None) -> str:
    counts = ", ".join(text for text, _ in _counts(status, pace))
    memory = ", ".join(f"{name} {_of(used, tier)}" for name, tier, used in _tiers(status))
    parts = (f"{_labels(status)}, {counts}", memory, _assets(status), _references(status), _waits(status))
    return f"gpuyard: {'; '.join(filter(None, parts))}"


def picture_of(status: RenderStatus, pace: float | None, frame: Frame) -> list[Line]:
    waits = _waits(status)
    style = "red" if status.skipped else "green"
    counts = [part for fact in _counts(status, pace) for part in (("   ", None), fact)]
    return [
        progress_head("", _done(status) / max(1, status.labels), _labels(status), style, frame),
        tuple(counts[1:]),
        *_memory_lines(status, frame),
        ((_assets(status), None),),
        ((_references(status), None),),
        ((waits or "no worker is waiting", "yellow" if waits else "dim"),),
    ]


def _memory_lines(status: RenderStatus, frame: Frame) -> list[Line]:
    tiers = [(name, tier, used, _of(used, tier)) for name, tier, used in _tiers(status)]
    whole = max(len(text) for *_, text in tiers) + len("VRAM") + 2 * len(GAP)
    width = max(1, min(_BAR_WIDTH, frame.columns - 1 - whole))
    lines: list[Line] = []
    for name, tier, used, text in tiers:
        full, empty = bar(used / max(1, tier.budget), width)
        lines.append(((f"{name:4}{GAP}", None), (full, "cyan"), (empty, "dim"), (f"{GAP}{text}", None)))
    is_wide = 2 * (whole + _BAR_WIDTH) + len(GAP) < frame.columns
    return [(*lines[0], (GAP, None), *lines[1])] if is_wide else lines


class RenderScreen:
    """Shows the progress of a render on a display: in place, or in a pipe as a line every 10 s."""

    def __init__(self, display: LiveDisplay | PlainDisplay) -> None:
        self._display, self._pace = display, RenderRate()
        self.note = display.note

    def show(self, status: RenderStatus) -> None:
        pace = self._pace.note(status)
        self._display.show(partial(picture_of, status, pace), line_of(status, pace))


@contextlib.contextmanager
def screen() -> Iterator[RenderScreen]:
    with progress_display(10.0, 10.0) as display, contextlib.ExitStack() as above:
        if isinstance(display, LiveDisplay):
            above.enter_context(printing_above(display))
        yield RenderScreen(display)


# The summary


def summary_lines(report: RenderReport, bad: tuple[ManifestMistake, ...], out: str) -> list[str]:
    status = report.status
    counts = {"existed already": status.already, "skipped": status.skipped, "left": status.labels - _done(status)}
    parts = [f"{status.rendered:,} of {status.labels:,} labels rendered"]
    parts += [f"{count:,} {what}" for what, count in counts.items() if count]
    head = f"{', '.join(parts)}, in {format_duration(status.elapsed_s)}"
    return [head, "", *lay_out_facts(_facts(report, bad, out))]


def _facts(report: RenderReport, bad: tuple[ManifestMistake, ...], out: str) -> Iterator[tuple[str, list[str]]]:
    status, counts = report.status, report.status.counts
    if bad:
        yield "manifest", [f"{format_count(len(bad), 'error')}; entries with errors were left out"]
    for kind, number in Counter(skip.kind for skip in report.skipped).most_common():
        lines = [f"{number:,}: {_SKIPS.get(kind, kind)}"]
        some_skips = [skip for skip in report.skipped if skip.kind == kind][:_MOST_SHOWN]
        lines += [f"  {clean(skip.label)}: {clean(skip.reason)}" for skip in some_skips]
        if number > _MOST_SHOWN:
            lines.append(f"  and {number - _MOST_SHOWN:,} more: see {clean(out)}/skipped.jsonl")
        yield "skipped", lines
    if status.rendered:
        moved = status.moved
        amounts = {
            "read": moved.read_from_disk,
            "uploaded": moved.uploaded,
            "streamed": moved.streamed,
            "brought back to RAM": moved.downloaded,
        }
        some = ", ".join(f"{format_bytes(nbytes)} {verb}" for verb, nbytes in amounts.items() if nbytes)
        yield "moved", [some or "nothing"]
        streams = f"; {counts.streams:,} streamed" if counts.streams else ""
        found = f"{counts.vram_hits:,} found in VRAM, {counts.ram_hits:,} in RAM, {counts.misses:,} on disk{streams}"
        yield "assets", [found]
        peak = max(status.vram.peak_assets, status.vram.peak_allocator or 0)
        yield "peak", [f"VRAM {_of(peak, status.vram)}, RAM {_of(status.ram.peak_assets, status.ram)}"]
    if counts.out_of_memory:
        yield "VRAM full", [f"{format_count(counts.out_of_memory, 'time')}; assets were dropped from VRAM"]
    stalls = sorted(((seconds, cause) for cause, seconds in status.stalls_s.items() if seconds >= 1), reverse=True)
    if stalls:
        yield (
            "waited",
            [f"{format_duration(seconds)} {_WAITS.get(cause, (cause, cause))[1]}" for seconds, cause in stalls],
        )
    yield "files", [clean(out)]
