"""A batch as its user sees it: the progress while it runs, on standard error, and the summary at the end. All figures
are the daemon's, so a batch that is followed again later is shown as if it had been followed all the time."""

import time
from collections import deque
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.client.retrying import RetryingClient
from gpuyard.model.lifecycle import LIVE
from gpuyard.model.units import format_count, format_duration
from gpuyard.policy.batch_pacing import why_unread
from gpuyard.recipes.batch.finish import Summary
from gpuyard.recipes.batch.plan import BatchPart, BatchPlan
from gpuyard.ui.cli.text_table import Line, Span, clean, lay_out_facts
from gpuyard.ui.views import Frame
from gpuyard.ui.views.live_display import progress_display, progress_head, time_text

_WAITS = {
    "cpu": "for the CPU to be less busy (--max-cpu)",
    "memory": "for RAM (--min-free-mem-mb)",
    "gpu": "for a GPU to be less busy (--max-gpu)",
    "gpu-memory": "for GPU memory (--max-gpu-mem-mb)",
    "room": "for a free GPU",
    "concurrency": "for other runs to finish (--concurrency)",
    "stagger": "between starts (--stagger)",
    "pause": "while the queue was paused",
}


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
    def changes(self) -> tuple[object, ...]:
        """What a line in a pipe is printed for."""
        return self.succeeded, self.failed, self.cancelled, self.running, self.gate

    @property
    def waiting(self) -> int:
        return self.total - self.finished - self.running

    @property
    def done(self) -> str:
        return f"{self.finished:,} of {self.total:,} done"


class TimeLeft:
    """Estimates the time left from the pace of the most recent runs."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()
        self._most_at_once = 1

    def note(self, now: float, finished: int, running: int) -> None:
        self._most_at_once = max(self._most_at_once, running)
        if not self._seen or finished != self._seen[-1][1]:
            self._seen.append((now, finished))
        recent = max(20, 2 * self._most_at_once)
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


def progress_of(name: str, status: dict[str, Any], elapsed_s: float) -> Progress:
    counts: dict[str, int] = status["counts"]
    held_by, device = status["held_by"], status["device"]
    if held_by is not None and device is not None:
        label = status["device_label"]
        held_by = f"{held_by} on {device if label is None else f'GPU {label}'}"
    return Progress(
        name=name,
        total=status["count"],
        succeeded=counts.get("succeeded", 0),
        failed=counts.get("failed", 0) + counts.get("rejected", 0),
        cancelled=counts.get("cancelled", 0),
        running=sum(counts.get(state, 0) for state in LIVE),
        gate=status["gate"],
        held_by=held_by,
        held=counts.get("held", 0),
        elapsed_s=max(0.0, elapsed_s),
    )


def counts_of(progress: Progress) -> Iterator[Span]:
    yield f"{progress.running:,} running", "cyan" if progress.running else "dim"
    yield f"{progress.waiting:,} waiting", None if progress.waiting else "dim"
    if progress.failed:
        yield f"{progress.failed:,} failed", "red"
    if progress.cancelled:
        yield f"{progress.cancelled:,} cancelled", "yellow"


def hold_of(progress: Progress) -> str:
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
    before = dict.fromkeys(("cpu", "memory", "gpu", "gpu-memory"), "limited by ") | {"room": "waits for a GPU: "}
    return f"{before.get(progress.gate, '')}{clean(progress.held_by)}"


def line_of(progress: Progress) -> str:
    counts = ", ".join(text for text, _ in counts_of(progress))
    return f"gpuyard: {progress.done}, {counts}; {hold_of(progress)}; {time_text(progress.elapsed_s, progress.left_s)}"


def picture_of(progress: Progress, frame: Frame) -> list[Line]:
    style = "red" if progress.failed else "green"
    counts = [part for fact in counts_of(progress) for part in (fact, ("   ", None))]
    # --concurrency and --stagger hold runs back in normal operation.
    is_held = progress.waiting and progress.gate not in (None, "concurrency", "stagger")
    return [
        progress_head(progress.name, progress.finished / max(1, progress.total), progress.done, style, frame),
        (*counts, (time_text(progress.elapsed_s, progress.left_s), "dim")),
        ((hold_of(progress), "yellow" if is_held else "dim"),),
    ]


def follow(name: str, part: BatchPart) -> dict[str, Any]:
    """Show the progress until the end, and return the job that sums up. KeyboardInterrupt restores the terminal."""
    estimate, noted = TimeLeft(), set[str]()
    with RetryingClient() as queue, progress_display(0.0, 5.0) as screen:
        submitted_at = queue.get(f"/jobs/{part.first}")["submitted_at"]
        status = queue.get(f"/batches/{part.first}")
        # Only here: the daemon's clock may be set later.
        age = datetime.fromisoformat(status["now"]) - datetime.fromisoformat(submitted_at)
        since, is_over = time.monotonic() - age.total_seconds(), False
        while True:
            silent = status.get("silent")
            facts = [f"{limit} is not enforced: {why_unread(limit, silent)}" for limit in status["unknown"]]
            if silent and not any(silent in fact for fact in facts):
                facts.append(f"{silent}; `gpuyard doctor` says more")
            for fact in facts:
                if fact not in noted:
                    noted.add(fact)
                    screen.note(f"gpuyard: {fact}")
            progress = progress_of(name, status, time.monotonic() - since)
            estimate.note(progress.elapsed_s, progress.finished, progress.running)
            rest = progress.total - progress.finished
            shown = replace(progress, left_s=estimate.left_s(progress.elapsed_s, rest) if rest else None)
            screen.show(partial(picture_of, shown), line_of(shown), shown.changes)
            if is_over:
                return queue.get(f"/jobs/{part.finish}")
            is_over = queue.get("/wait", {"ids": str(part.finish), "timeout": "0.5"}, 0.5)["done"]
            status = queue.get(f"/batches/{part.first}")


# The summary


def summary_lines(summary: Summary, plan: BatchPlan) -> list[str]:
    parts = [f"{summary.succeeded:,} of {format_count(summary.runs, 'run')} succeeded"]
    if summary.is_whole:
        parts = ["the run succeeded" if summary.runs == 1 else f"all {summary.runs:,} runs succeeded"]
    parts += [f"{summary.failed:,} failed"] if summary.failed else []
    parts += [f"{summary.cancelled:,} cancelled"] if summary.cancelled else []
    parts += [] if summary.seconds is None else [f"in {format_duration(summary.seconds)}"]
    return [f"{summary.name}: {', '.join(parts)}", "", *lay_out_facts(_facts(summary, plan))]


def _facts(summary: Summary, plan: BatchPlan) -> Iterator[tuple[str, list[str]]]:
    if summary.attempts > summary.runs:
        yield "attempts", [f"{summary.attempts:,}"]
    if summary.frames is not None:
        yield "frames", [f"{summary.frames:,}"]
    if summary.kept is not None and summary.kept_in is not None:
        yield "kept", [f"{format_count(summary.kept, 'run')} with data, in {clean(summary.kept_in)}"]
    if plan.pruned_root is not None:
        where = "" if summary.kept_in == plan.pruned_root else f", in {clean(plan.pruned_root)}"
        yield "pruned", [f"{format_count(summary.pruned, 'run')} without a frame{where}"]
    if summary.left:
        yield "not pruned", _cut([f"{each.run}: {clean(each.why)}" for each in summary.left])
    waits = sorted(((seconds, gate) for gate, seconds in summary.waits_s.items() if seconds >= 1), reverse=True)
    if waits:
        width = max(len(format_duration(seconds)) for seconds, _ in waits)
        yield "waited", [f"{format_duration(seconds):>{width}} {_WAITS.get(gate, gate)}" for seconds, gate in waits]
    if summary.unknown:
        yield "unchecked", [f"{bound}: {why_unread(bound, summary.silent)}" for bound in summary.unknown]
    failures = [
        f"run {each.index}, seed {each.seed}: {clean(each.reason or each.state)}"
        + (f"  {clean(each.log)}" if each.log else "")
        for each in summary.failures
        if each.state != "cancelled"
    ]
    if failures:
        yield "failed", _cut(failures)
    yield "files", [clean(summary.root)]


def _cut(lines: list[str]) -> list[str]:
    more = len(lines) - 20
    return [*lines[:20], f"and {more:,} more: see summary.json"] if more > 0 else lines
