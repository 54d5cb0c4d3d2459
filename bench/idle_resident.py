"""Rendering with everything in VRAM: the bound of launches, and what makes it slower. One process of `residency_idle`.

Each measurement renders the same labels in some threads, with plain kernels or CUDA graphs, beside something that a
residency run does meanwhile: pinning, reading, uploading, syncing outputs.
"""

import contextlib
import itertools
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import graph_render, residency_render
from bench.intervals import clip, gaps, total, union
from bench.lock_probe import IssueTimes, LockProbe, percentiles_us
from bench.residency_bound import Resident
from gpuyard.recipes.render.memory.cuda_memory import PinnedSlabs
from gpuyard.recipes.render.memory.leased_memory import torch_with_gpu
from gpuyard.recipes.render.planning.assets_and_units import Label
from gpuyard.recipes.render.write_outputs import Outputs, OutputWriters

_MB = 1048576
_VIEWS = 8
_PAGE = 4 * _MB
_PINNED = 3 << 30
_MOST_THREADS = 6
_LABELS_PER_S = 75  # of a run with 600 pictures per second

Act = Callable[[], None]


class Measure:
    """`labels` per measurement. `beside` acts are called over and over in a thread of their own meanwhile."""

    def __init__(self, folder: Path, labels: int) -> None:
        self._torch = torch_with_gpu("cuda")
        self._folder, self._labels = folder, labels
        self._resident = Resident(folder, range(_MOST_THREADS))
        self._issue = IssueTimes()
        self._issue.wrap(residency_render, "_picture")
        self._issue.wrap(graph_render, "picture")
        self._kept: list[Any] = []

    def rate(self, threads: int, *, graphs: bool = False, beside: dict[str, Act] | None = None) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as out, ThreadPoolExecutor(threads) as pool:
            self._render(pool, threads, 2, Path(out), graphs=graphs)
            self._issue.take()
            with _running(beside or {}) as turns, LockProbe() as probe:
                began, used = time.perf_counter(), time.process_time()
                labels = self._render(pool, threads, self._labels // threads, Path(out), graphs=graphs)
                took_s, cpu_s = time.perf_counter() - began, time.process_time() - used
            return {
                "pictures_per_s": round(labels * _VIEWS / took_s, 1),
                "ms_per_picture": round(1e3 * took_s / labels / _VIEWS, 3),
                "cores": round(cpu_s / took_s, 2),
                "issue": self._issue.take(),
                "lock_wait_us": probe.figures(),
                **(
                    {"beside_per_s": {name: round(count / took_s, 1) for name, count in turns.items()}} if turns else {}
                ),
            }

    def _render(self, pool: ThreadPoolExecutor, threads: int, labels: int, out: Path, *, graphs: bool) -> int:
        render = graph_render.render_label if graphs else residency_render.render_label

        def run(number: int) -> None:
            scene, frames = self._resident.pairs[number]
            own = out / str(number)
            own.mkdir(exist_ok=True)
            with self._torch.cuda.stream(self._stream(number)):
                for turn in range(labels):
                    render(scene, frames, {"turn": turn, "views": _VIEWS}, own)

        list(pool.map(run, range(threads)))
        return labels * threads

    def _stream(self, number: int) -> Any:
        while len(self._kept) <= number:
            self._kept.append(self._torch.cuda.Stream())
        return self._kept[number]

    def profile(self, threads: int, labels: int = 12) -> dict[str, Any]:
        """Return the kernels' time, the card's busy part between the first and the last, and the time of launches."""
        from torch.profiler import ProfilerActivity, profile

        with tempfile.TemporaryDirectory() as out, ThreadPoolExecutor(threads) as pool:
            self._render(pool, threads, 2, Path(out), graphs=False)
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                count = self._render(pool, threads, labels, Path(out), graphs=False)
                self._torch.cuda.synchronize()
            path = Path(out) / "trace.json"
            profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_bytes())["traceEvents"]
        spans = [(float(e["ts"]) / 1e6, (float(e["ts"]) + float(e["dur"])) / 1e6, e) for e in events if "dur" in e]
        kernels = [(start, end) for start, end, e in spans if e.get("cat") == "kernel"]
        launches = [end - start for start, end, e in spans if "LaunchKernel" in e.get("name", "")]
        window = (min(start for start, _ in kernels), max(end for _, end in kernels))
        busy = union(clip(kernels, window))
        idle = gaps(busy, window)
        return {
            "kernels_per_picture": round(len(kernels) / count / _VIEWS, 1),
            "kernel_ms_per_picture": round(1e3 * total(kernels) / count / _VIEWS, 4),
            "busy_ms_per_picture": round(1e3 * total(busy) / count / _VIEWS, 4),
            "busy_percent": round(100 * total(busy) / (window[1] - window[0]), 1),
            "launch_us": percentiles_us(launches),
            "gap_us": percentiles_us([end - start for start, end in idle]),
        }

    def check_graphs(self) -> bool:
        """Whether a graph draws the same picture."""
        scene, frames = self._resident.pairs[0]
        with self._torch.cuda.stream(self._stream(0)):
            plain = residency_render._picture(scene, frames, 3, 0.7)  # noqa: SLF001
            drawn = graph_render.picture(scene, frames, 3, 0.7)
            return bool((plain == drawn).all().item())

    # What a residency run does beside rendering

    def pin_pages(self) -> None:
        """4 MB of PyTorch's pinned memory."""
        self._pinned.append(self._torch.empty(_PAGE, dtype=self._torch.uint8, pin_memory=True))

    def pin_slabs(self) -> None:
        """The same amount of memory on huge pages."""
        self._pinned.append(self._slabs.page(_PAGE))

    @contextlib.contextmanager
    def pinning(self) -> Iterator[None]:
        self._pinned: list[Any] = []
        self._slabs = PinnedSlabs(self._torch, self._torch.device("cuda", 0))
        yield
        self._pinned.clear()
        self._slabs.close()
        self._torch._C._host_emptyCache()  # noqa: SLF001 - PyTorch would keep the memory pinned

    def reader(self, number: int) -> Act:
        """Return an act that reads 64 MB of a cached file."""
        file = os.open(self._folder / "scenes" / f"{number + 10}.ply", os.O_RDONLY)
        buffer = self._torch.empty(64 * _MB, dtype=self._torch.uint8, pin_memory=True).numpy().data
        return lambda: void(os.preadv(file, [buffer], 0))

    def uploader(self) -> Act:
        """Return an act that copies 1 GB to the card in parts of 4 MB, on a stream of its own."""
        torch = self._torch
        source = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
        target, stream = torch.empty_like(source, device="cuda"), torch.cuda.Stream()

        def upload() -> None:
            with torch.cuda.stream(stream):
                for at in range(0, 1 << 30, _PAGE):
                    target[at : at + _PAGE].copy_(source[at : at + _PAGE], non_blocking=True)
                event = torch.cuda.Event(blocking=True)
                event.record(stream)
                event.synchronize()

        return upload

    @contextlib.contextmanager
    def saving(self, out: Path) -> Iterator[Act]:
        """Yield an act that hands an output to residency's writers and waits, as often as a run has a label."""
        numbers, has_passed = itertools.count(), threading.Event()
        with Outputs(out, resume=False) as outputs, OutputWriters() as writers:

            def save() -> None:
                label = Label(name=f"saved-{next(numbers)}", value=None)
                folder = outputs.open(label)
                (folder / "views.npy").write_bytes(bytes(100_000))
                writers.write(lambda: outputs.commit(label, folder))
                has_passed.wait(1 / _LABELS_PER_S)

            yield save

    def pin_rates(self) -> dict[str, Any]:
        """GB per second of pinning 3 GB, and of unpinning it again, which the end of a process does."""
        kinds = (("PyTorch's pages", self.pin_pages), ("huge pages", self.pin_slabs))
        return {f"{name}, {threads} threads": self._pin_rate(pin, threads) for name, pin in kinds for threads in (1, 4)}

    def _pin_rate(self, pin: Act, threads: int) -> dict[str, float]:
        with ThreadPoolExecutor(threads) as pool:
            with self.pinning():
                began = time.perf_counter()
                list(pool.map(lambda _: pin(), range(_PINNED // _PAGE)))
                pinned_s = time.perf_counter() - began
                began = time.perf_counter()
            unpinned_s = time.perf_counter() - began
        gigabytes = _PINNED / (1 << 30)
        return {"pin": round(gigabytes / pinned_s, 2), "unpin": round(gigabytes / unpinned_s, 2)}


def void(_: object) -> None:
    return None


@contextlib.contextmanager
def _running(acts: dict[str, Act]) -> Iterator[dict[str, int]]:
    """Call each act over and over in its own thread. Yield the number of calls by name."""
    is_over, turns = threading.Event(), dict.fromkeys(acts, 0)

    def repeat(name: str) -> None:
        while not is_over.is_set():
            acts[name]()
            turns[name] += 1

    threads = [threading.Thread(target=repeat, args=(name,)) for name in acts]
    for thread in threads:
        thread.start()
    try:
        yield turns
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def resident(folder: str, labels: str) -> dict[str, Any]:
    """All measurements; one that fails is reported as its error."""
    measure = Measure(Path(folder), int(labels))
    results: dict[str, Any] = {}

    def add(name: str, act: Callable[[], Any]) -> None:
        try:
            results[name] = act()
        except Exception as error:  # noqa: BLE001 - the other measurements go on
            results[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
        print(f"  {name}: {json.dumps(results[name])}", flush=True)

    for threads in (1, 4):
        add(f"profile, {threads} threads", lambda threads=threads: measure.profile(threads))
    for threads in (1, 2, 3, 4, 6):
        add(f"{threads} threads", lambda threads=threads: measure.rate(threads))
    with tempfile.TemporaryDirectory(dir=folder) as out, measure.saving(Path(out)) as save:
        beside: dict[str, Callable[[], dict[str, Act]]] = {
            "4 MB pinned by PyTorch": lambda: {"pin": measure.pin_pages},
            "4 MB pinned on huge pages": lambda: {"pin": measure.pin_slabs},
            "4 threads that read 64 MB": lambda: {f"read {n}": measure.reader(n) for n in range(4)},
            "uploads of 1 GB": lambda: {"upload": measure.uploader()},
            "outputs that are synced": lambda: {"save": save},
        }
        for name, make in beside.items():
            with measure.pinning():
                add(f"4 threads beside {name}", lambda make=make: measure.rate(4, beside=make()))
    add("pinning and unpinning, GB/s", measure.pin_rates)
    add("graphs draw the same picture", measure.check_graphs)
    for threads in (1, 2, 4):
        add(f"graphs, {threads} threads", lambda threads=threads: measure.rate(threads, graphs=True))
    for name in ("4 MB pinned by PyTorch", "uploads of 1 GB"):
        with measure.pinning():
            add(
                f"graphs, 4 threads beside {name}",
                lambda name=name: measure.rate(4, graphs=True, beside=beside[name]()),
            )
    return results
