"""Where the time of `python -m bench.residency`'s Coordinator goes: what each thread did, and why the card was idle.

    python -m bench.residency_timeline FOLDER [--parts run,window] [--json FILE] [--tiny]

`run` is a complete run without a profiler: the phases of the process, the states of each thread, and the samples of an
idle card by what the workers did. `window` runs with PyTorch's profiler, and stops early: exact busy and idle times of
the card in two windows, the idle ones by what the workers did, kernels, and calls of the driver.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.intervals import Interval, Span, ThreadStates, by_size, clip, gaps, total, union
from bench.lock_probe import percentiles_us
from bench.residency import TINY, CardMonitor
from bench.residency_data import Shape, drop_from_cache, make
from bench.residency_render import render_label
from bench.span_recorder import SpanRecorder
from gpuyard.recipes.render.planning.assets_and_units import DEFAULT_WORKERS

# Seconds after the first label begins, and the length of the window.
_WINDOWS = ((-1.0, 4.0), (12.0, 3.0))
_WORKER = "gpuyard-worker"


def run(folder: str, out: str, spawned: float, *settings: str) -> dict[str, Any]:
    """A complete run; the parent adds the time of the process's end."""
    imported = time.time()
    recorder = SpanRecorder()
    device, vram, ram, workers = settings
    recorder.wrap_residency(is_cuda=device == "cuda")
    marks = {"interpreter and imports": imported - spawned}
    with CardMonitor() as monitor:
        status, ended = _render(recorder, folder, out, (device, vram, ram, workers), marks)
    labels = [span for span in recorder.spans if span.what == "render"]
    work = (min(span.start for span in labels), max(span.end for span in labels))
    marks["until the first label"] = work[0] - imported - marks["import PyTorch, lease and open"]
    marks["from the first label to the last"] = work[1] - work[0]
    marks["close"] = ended - work[1]
    return {
        "ended": ended,
        "phases_s": {name: round(seconds, 2) for name, seconds in marks.items()},
        "stalls_s": status.stalls_s,
        **monitor.figures(),
        **allocator_calls(device),
        **_thread_states(recorder.spans, work),
        "idle_samples": _idle_samples(monitor, recorder.spans, work),
        "first_spans": _first_spans(recorder.spans, imported),
    }


def _render(
    recorder: SpanRecorder, folder: str, out: str, settings: Sequence[str], marks: dict[str, float]
) -> tuple[Any, float]:
    from gpuyard.recipes.render.manifest import read
    from gpuyard.residency import Coordinator

    device, vram, ram, workers = settings
    units = read(str(Path(folder) / "manifest.jsonl")).units

    def render(*arguments: Any) -> None:
        with recorder.span("render"):
            render_label(*arguments)

    began = time.time()
    with Coordinator(vram=vram, ram=ram, workers=int(workers), device=device) as coordinator:
        marks["import PyTorch, lease and open"] = time.time() - began
        status = coordinator.run(units, render, out).status
        marks["close, of which the device"] = -time.time()
    ended = time.time()
    marks["close, of which the device"] += ended
    return status, ended


def allocator_calls(device: str) -> dict[str, Any]:
    """Return how often PyTorch's allocator called the driver, and how often it had to free its cache."""
    if device != "cuda":
        return {}
    import torch

    stats = torch.cuda.memory_stats()
    names = ("num_alloc_retries", "num_device_alloc", "num_device_free", "num_sync_all_streams", "num_ooms")
    return {"allocator": {name: stats.get(name) for name in names}}


def _thread_states(spans: Sequence[Span], window: Interval) -> dict[str, Any]:
    states = ThreadStates(spans)
    workers = [thread for thread in states.threads if thread.startswith(_WORKER)]
    rendering = union((span.start, span.end) for span in spans if span.what in {"render", "finish"})
    without = gaps(rendering, window)
    return {
        "threads_s": {thread: states.seconds(thread, window) for thread in states.threads},
        "no_worker_renders_s": round(total(without), 3),
        "no_worker_renders_causes_s": states.causes(without, workers)[:8],
        "pinned": sum_spans(spans, "pin"),
        "reads": sum_spans(spans, "read"),
        "uploads": sum_spans(spans, "upload"),
        "syncs": sum_spans(spans, "sync output"),
    }


def sum_spans(spans: Sequence[Span], what: str) -> dict[str, float]:
    taken = sorted(span.end - span.start for span in spans if span.what == what)
    if not taken:
        return {"count": 0}
    return {
        "count": len(taken),
        "total_s": round(sum(taken), 3),
        "median_ms": round(1e3 * taken[len(taken) // 2], 3),
        "longest_ms": round(1e3 * taken[-1], 1),
    }


def _idle_samples(monitor: CardMonitor, spans: Sequence[Span], work: Interval) -> dict[str, Any]:
    """Return the part of the samples in which the card was idle, in percent: before, during and after the work."""
    idle = [when for when, load, _ in monitor.samples if load == 0]
    count = max(1, len(monitor.samples))
    states = ThreadStates(spans)
    workers = [thread for thread in states.threads if thread.startswith(_WORKER)]
    within = [(when, when + 1.0) for when in idle if work[0] <= when <= work[1]]
    causes = states.causes([(start - 0.5, end - 0.5) for start, end in within], workers)
    return {
        "before_percent": round(100 * sum(when < work[0] for when in idle) / count, 1),
        "during_percent": round(100 * len(within) / count, 1),
        "after_percent": round(100 * sum(when > work[1] for when in idle) / count, 1),
        "during_samples": [(text, round(seconds)) for text, seconds in causes[:8]],
        "during_at_s": [round(start - work[0], 2) for start, _ in within][:60],
    }


def _first_spans(spans: Sequence[Span], since: float) -> list[str]:
    """Return the first transfers and labels, as text."""
    wanted = [span for span in spans if span.what in {"read", "upload", "render"}]
    wanted.sort(key=lambda span: span.start)
    return [f"{span.start - since:.2f} to {span.end - since:.2f}: {span.what} ({span.thread})" for span in wanted[:24]]


def window(folder: str, out: str, spawned: float, *settings: str) -> dict[str, Any]:
    """Profile the card in two windows, then stop the run."""
    del spawned
    from torch.profiler import ProfilerActivity, profile

    from gpuyard.recipes.render.manifest import read
    from gpuyard.residency import Coordinator

    device, vram, ram, workers = settings
    recorder = SpanRecorder()
    recorder.wrap_residency(is_cuda=device == "cuda")
    first_label = threading.Event()

    def render(*arguments: Any) -> None:
        first_label.set()
        with recorder.span("render"):
            render_label(*arguments)

    units = read(str(Path(folder) / "manifest.jsonl")).units
    traces: list[tuple[dict[str, Any], Interval]] = []
    with Coordinator(vram=vram, ram=ram, workers=int(workers), device=device) as coordinator:
        with profile(activities=[ProfilerActivity.CUDA]):
            pass  # the first profile initializes CUPTI
        thread = threading.Thread(target=coordinator.run, args=(units, render, out))
        # A profile begins and ends in one thread.
        profiler = profile(activities=[ProfilerActivity.CUDA])
        profiler.start()
        opened = time.time()
        thread.start()
        first_label.wait(60)
        began = time.time()
        for number, (at, length) in enumerate(_WINDOWS):
            if number:
                time.sleep(max(0.0, began + at - time.time()))
                profiler = profile(activities=[ProfilerActivity.CUDA])
                profiler.start()
            start = time.time() if number else opened
            end = max(start, began + at) + length
            time.sleep(max(0.0, end - time.time()))
            end = time.time()
            profiler.stop()
            traces.append((_trace(profiler), (start, end)))  # the next profile clears this one
        coordinator.stop()
        thread.join()
    return {
        "first_label_s": round(began - opened, 2),
        "windows": [_explain(trace, window, recorder.spans, began) for trace, window in traces],
    }


def _trace(profiler: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        trace: dict[str, Any] = json.loads(Path(file.name).read_bytes())
    return trace


def _explain(trace: dict[str, Any], window: Interval, spans: Sequence[Span], began: float) -> dict[str, Any]:
    """Return the busy and idle times of the card. `began` is when the first label began."""
    base = float(trace.get("baseTimeNanoseconds", 0)) / 1e9
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    kernels = [_interval(event, base) for event in events if event.get("cat") == "kernel"]
    copies = [_interval(event, base) for event in events if event.get("cat") in {"gpu_memcpy", "gpu_memset"}]
    work = (max(window[0], min(start for start, _ in kernels)), window[1])
    busy = union(clip(kernels, work))
    idle = gaps(busy, work)
    states = ThreadStates(spans)
    workers = [thread for thread in states.threads if thread.startswith(_WORKER)]
    seconds = work[1] - work[0]
    return {
        "window_s": [round(when - began, 2) for when in window],
        "first_kernel_s": round(work[0] - began, 3),
        "kernels": len(kernels),
        "kernel_sum_s": round(total(clip(kernels, work)), 3),
        "busy_percent": round(100 * total(busy) / seconds, 2),
        "busy_or_copying_percent": round(100 * total(union(clip([*kernels, *copies], work))) / seconds, 2),
        "pictures_per_s": round(
            8 * sum(s.what == "render" and work[0] <= s.end <= work[1] for s in spans) / seconds, 1
        ),
        "idle_s": round(total(idle), 3),
        "idle_by_length_s": by_size(idle),
        "idle_causes_s": states.causes(idle, workers)[:12],
        "longest_idle": _longest(idle, states, workers, began),
        "threads_s": {thread: states.seconds(thread, work) for thread in states.threads},
        "launch_us": percentiles_us(
            [float(event["dur"]) / 1e6 for event in events if "LaunchKernel" in event.get("name", "")]
        ),
        "launching_s_by_thread": _launching(events),
        "top_kernels": _top(event for event in events if event.get("cat") == "kernel"),
        "driver_calls": _top(event for event in events if event.get("cat") in {"cuda_runtime", "cuda_driver"}),
    }


def _launching(events: Sequence[dict[str, Any]]) -> list[float]:
    """Return the seconds that each thread spent inside the driver's launches, longest first."""
    sums: dict[object, float] = {}
    for event in events:
        if "LaunchKernel" in event.get("name", ""):
            sums[event.get("tid")] = sums.get(event.get("tid"), 0.0) + float(event["dur"]) / 1e6
    return sorted((round(seconds, 3) for seconds in sums.values()), reverse=True)


def _interval(event: dict[str, Any], base: float) -> Interval:
    start = base + float(event["ts"]) / 1e6
    return start, start + float(event["dur"]) / 1e6


def _longest(idle: Sequence[Interval], states: ThreadStates, workers: Sequence[str], began: float) -> list[str]:
    longest = sorted(idle, key=lambda gap: gap[0] - gap[1])[:8]
    return [
        f"{start - began:.3f}: {1e3 * (end - start):.1f} ms, "
        + ", ".join(states.at(thread, (start + end) / 2) for thread in workers)
        for start, end in longest
    ]


def _top(events: Any) -> list[str]:
    sums: dict[str, list[float]] = {}
    for event in events:
        sums.setdefault(event["name"][:90], []).append(float(event["dur"]))
    longest = sorted(sums.items(), key=lambda item: -sum(item[1]))[:9]
    return [
        f"{sum(taken) / 1e3:.1f} ms in {len(taken)}, longest {max(taken) / 1e3:.2f} ms: {name}"
        for name, taken in longest
    ]


_SIDES: dict[str, Callable[..., dict[str, Any]]] = {"run": run, "window": window}


def _measure(part: str, options: argparse.Namespace) -> dict[str, Any]:
    out = options.folder / "out" / part
    shutil.rmtree(out, ignore_errors=True)
    drop_from_cache(options.folder)
    device = "host" if options.tiny else "cuda"
    spawned = time.time()
    settings = [device, options.vram, options.ram, str(options.workers)]
    command = [sys.executable, "-m", "bench.residency_timeline", str(options.folder), "--side", part]
    command += ["--settings", json.dumps([str(out), spawned, *settings])]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    ended = time.time()
    figures: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    figures["took_s"] = round(ended - spawned, 2)
    reported = figures.pop("reported")
    if "ended" in figures:
        figures["report_s"] = round(reported - figures.pop("ended"), 2)
        figures["phases_s"]["exit"] = round(ended - reported, 2)
    return figures


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.residency_timeline")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", default="run,window")
    parser.add_argument("--tiny", action="store_true", help="small files, in the host's memory")
    parser.add_argument("--vram")
    parser.add_argument("--ram")
    parser.add_argument("--workers", type=int, default=DEFAULT_WORKERS)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--settings", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.side is not None:
        out, spawned, *settings = options.settings
        figures = _SIDES[options.side](str(options.folder), out, spawned, *settings)
        print(json.dumps({**figures, "reported": time.time()}), flush=True)
        return
    options.vram = options.vram or ("5M" if options.tiny else "12G")
    options.ram = options.ram or ("3M" if options.tiny else "20G")
    make(options.folder, TINY if options.tiny else Shape())
    for part in options.parts.split(","):
        print(f"{part}: {json.dumps(_measure(part, options), indent=1)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
