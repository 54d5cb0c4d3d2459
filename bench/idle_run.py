"""A residency run with one thing changed, and the rate of pictures in each of its seconds. One process of
`residency_idle`."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from bench import graph_render, residency_render
from bench.intervals import Interval, Span, ThreadStates, clip, total
from bench.lock_probe import IssueTimes, LockProbe
from bench.residency import CardMonitor
from bench.residency_timeline import allocator_calls, sum_spans
from bench.span_recorder import SpanRecorder
from gpuyard.recipes.render import write_outputs as output_folders
from gpuyard.recipes.render import write_outputs as output_writers
from gpuyard.recipes.render.memory import cuda_memory as pinned_slabs
from gpuyard.recipes.render.planning.assets_and_units import DEFAULT_WORKERS

_WORKER = "gpuyard-worker"


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """`seconds`: stop so long after the first label; None for a whole run. `depth`: load at most the assets of so many
    units ahead of time; None for all that fit. `renderer`: plain, graphs, or nothing for transfers alone."""

    device: str
    vram: str
    ram: str
    workers: int = DEFAULT_WORKERS
    seconds: float | None = None
    depth: int | None = None
    renderer: str = "plain"
    pages: str = "huge"  # or pytorch
    slab_mb: int | None = None  # the largest slab of pinned memory; None for the default
    syncs: bool = True
    writers: int | None = None  # threads that sync outputs; None for the default
    working: str | None = None


def run(folder: str, out: str, spawned: float, variant: Variant) -> dict[str, Any]:
    """The parent adds the time of the process's end."""
    imported = time.time()
    recorder, issue = SpanRecorder(), IssueTimes()
    issue.wrap(residency_render, "_picture")
    issue.wrap(graph_render, "picture")
    _change(variant)
    recorder.wrap_residency(is_cuda=variant.device == "cuda")
    drawn: list[tuple[float, int]] = []
    with CardMonitor() as monitor, LockProbe() as probe:
        marks, report = _render(recorder, drawn, (folder, out), variant)
    status = report.status
    labels = [span for span in recorder.spans if span.what == "render"]
    work = (min(span.start for span in labels), max(span.end for span in labels))
    pictures = sum(views for _, views in drawn)
    return {
        "ended": time.time(),
        "work_s": round(work[1] - work[0], 2),
        "pictures": pictures,
        "pictures_per_s": round(pictures / (work[1] - work[0]), 1),
        "pictures_in_each_s": _in_each_s(work, drawn),
        "busy_in_each_s": {what: _busy_in_each_s(work, recorder.spans, what) for what in ("read", "pin", "upload")},
        "phases_s": {
            "interpreter and imports": round(imported - spawned, 2),
            "import PyTorch, lease and open": round(marks["opened"] - marks["began"], 2),
            "until the first label": round(work[0] - marks["opened"], 2),
            "from the last label to the end of the run": round(marks["rendered"] - work[1], 2),
            "close": round(marks["closed"] - marks["rendered"], 2),
        },
        "issue": issue.take(),
        "lock_wait_us": probe.figures(),
        "workers_s": _worker_states(recorder.spans, work),
        "skipped": len(report.skipped),
        "first_skip": report.skipped[0].reason[:300] if report.skipped else None,
        "stalls_s": status.stalls_s,
        "moved_gb": {name: round(n / (1 << 30), 2) for name, n in msgspec.to_builtins(status.moved).items()},
        **{what: sum_spans(recorder.spans, what) for what in ("read", "upload", "download", "pin", "sync output")},
        **monitor.figures(),
        **allocator_calls(variant.device),
    }


def _render(
    recorder: SpanRecorder, drawn: list[tuple[float, int]], folders: tuple[str, str], variant: Variant
) -> tuple[dict[str, float], Any]:
    """Add the time and the number of pictures of each label to `drawn`. Return the times of the phases and the
    report."""
    from gpuyard.recipes.render.manifest import read
    from gpuyard.residency import Coordinator

    folder, out = folders
    units = read(str(Path(folder) / "manifest.jsonl")).units
    draw = _renderer(variant)
    has_begun, is_over = threading.Event(), threading.Event()

    def render(*arguments: Any) -> None:
        has_begun.set()
        with recorder.span("render"):
            draw(*arguments)
        drawn.append((time.time(), int(arguments[2]["views"])))

    marks = {"began": time.time()}
    budgets = {"vram": variant.vram, "ram": variant.ram, "working": variant.working}
    with Coordinator(**budgets, workers=variant.workers, device=variant.device) as coordinator:  # type: ignore[arg-type]
        marks["opened"] = time.time()

        def stop() -> None:
            has_begun.wait()
            if not is_over.wait(variant.seconds):
                coordinator.stop()

        stopper = threading.Thread(target=stop)
        stopper.start()
        try:
            report = coordinator.run(units, render, out)
        finally:
            has_begun.set()
            is_over.set()
            stopper.join()
        marks["rendered"] = time.time()
    marks["closed"] = time.time()
    return marks, report


def _renderer(variant: Variant) -> Callable[..., None]:
    if variant.renderer == "nothing":
        return lambda *_: None
    return graph_render.render_label if variant.renderer == "graphs" else residency_render.render_label


def _change(variant: Variant) -> None:
    if variant.depth is not None:
        _limit_depth(variant.depth)
    if variant.pages == "pytorch":
        pinned_slabs.PinnedSlabs.page = lambda *_: None  # type: ignore[method-assign]
    if variant.slab_mb is not None:
        pinned_slabs._LARGEST_SLAB = variant.slab_mb << 20  # noqa: SLF001 - to measure what their size changes
    if variant.writers is not None:
        output_writers._THREADS = variant.writers  # noqa: SLF001 - to measure what their number changes
    if not variant.syncs:
        output_folders._flush = lambda _: None  # noqa: SLF001 - to measure what syncs cost


def _limit_depth(units: int) -> None:
    from gpuyard.recipes.render.memory.asset_tiers import Tiers

    plain = Tiers._state  # noqa: SLF001 - to measure what loading ahead of time brings

    def state(tiers: Tiers) -> Any:
        made = plain(tiers)
        made.ahead = [(place, key) for place, key in made.ahead if place < made.now + 2 * units]
        return made

    Tiers._state = state  # type: ignore[method-assign]  # noqa: SLF001


def _in_each_s(work: Interval, amounts: list[tuple[float, int]]) -> list[int]:
    sums: Counter[int] = Counter()
    for when, amount in amounts:
        sums[int(when - work[0])] += amount
    return [sums[second] for second in range(int(work[1] - work[0]) + 1)]


def _busy_in_each_s(work: Interval, spans: list[Span], what: str) -> list[float]:
    """Return how many threads did that, on average in each second."""
    own = [(span.start, span.end) for span in spans if span.what == what]
    starts = [work[0] + second for second in range(int(work[1] - work[0]) + 1)]
    return [round(total(clip(own, (start, start + 1))), 2) for start in starts]


def _worker_states(spans: list[Span], window: Interval) -> dict[str, float]:
    """Return the seconds of all workers together by what they did; `render` is queueing kernels and saving."""
    states = ThreadStates(spans)
    sums: Counter[str] = Counter()
    for thread in states.threads:
        if thread.startswith(_WORKER):
            sums.update(states.seconds(thread, window))  # type: ignore[arg-type]
    return {name: round(seconds, 2) for name, seconds in sums.most_common()}
