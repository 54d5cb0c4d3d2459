"""The bounds of `python -m bench.residency`: rendering with everything in VRAM, the disk, and pinning. On a real card:

    python -m bench.residency_bound FOLDER [--labels 200]

Uses the files of `bench.residency`. `resident` renders labels whose assets are in VRAM already, without residency, in
some threads of one process or in some processes; `kernels` is one label at a time under PyTorch's profiler.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import residency_render
from bench.residency_data import Shape, drop_from_cache, make
from bench.residency_side import Cloud
from gpuyard.recipes.render.memory.leased_memory import torch_with_gpu

_MB = 1048576
_CHUNK = 8 * _MB
_VIEWS = 8
_PICTURES = 16_000  # of the whole benchmark
_PINNED_PAGES, _PAGE = 1024, 4 * _MB


class Resident:
    """Scenes and actors in VRAM: thread number n renders scene n with actor n."""

    def __init__(self, folder: Path, numbers: Sequence[int]) -> None:
        self.pairs = {number: self._load(folder, number) for number in numbers}

    @staticmethod
    def _load(folder: Path, number: int) -> tuple[Cloud, list[Cloud]]:
        frames = sorted((folder / "actors" / str(number)).iterdir(), key=lambda path: int(path.stem))
        scene = Cloud(folder / "scenes" / f"{number}.ply", "cuda", lambda _: None)
        return scene, [Cloud(path, "cuda", lambda _: None) for path in frames]

    def render(self, number: int, labels: int, out: Path) -> None:
        import torch

        scene, frames = self.pairs[number]
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(labels):
                target = out / f"{number}-{turn}"
                target.mkdir()
                residency_render.render_label(scene, frames, {"turn": turn, "views": _VIEWS}, target)


def threads(folder: str, labels: str, *counts: str) -> dict[str, Any]:
    """Pictures per second with each number of threads, the same number of labels in all."""
    torch = torch_with_gpu("cuda")  # with the allocator's settings of residency
    resident = Resident(Path(folder), range(max(map(int, counts))))
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as out:
        resident.render(0, 5, Path(out))
        for count in map(int, counts):
            results[f"{count} threads"] = _rate(resident, count, int(labels), Path(out))
        sys.setswitchinterval(0.0005)
        results["4 threads that switch every 0.5 ms"] = _rate(resident, 4, int(labels), Path(out))
        sys.setswitchinterval(0.005)
        pinner = threading.Thread(target=lambda: results.update(pinning_beside=_pin(1)))
        pinner.start()
        results["4 threads beside pinning"] = _rate(resident, 4, int(labels), Path(out))
        pinner.join()
        results["issue_ms_per_label"] = _issue_ms(resident)
    results["pinning"] = {f"{count} threads": _pin(count) for count in (1, 4)}
    results["allocated_gb"] = round(torch.cuda.max_memory_reserved() / (1 << 30), 2)
    return results


def _rate(resident: Resident, count: int, labels: int, out: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=out) as own, ThreadPoolExecutor(count) as pool:
        began, used = time.perf_counter(), time.process_time()
        list(pool.map(lambda number: resident.render(number, labels // count, Path(own)), range(count)))
        took_s, cpu_s = time.perf_counter() - began, time.process_time() - used
    return _figures(labels // count * count, took_s, cpu_s)


def _figures(labels: int, took_s: float, cpu_s: float) -> dict[str, float]:
    pictures = labels * _VIEWS
    return {
        "pictures_per_s": round(pictures / took_s, 1),
        "all_pictures_s": round(took_s * _PICTURES / pictures, 1),
        "cores": round(cpu_s / took_s, 2),
    }


def _issue_ms(resident: Resident) -> float:
    """Return the time in which Python and PyTorch queue the work of one label, with an idle card before it."""
    import torch

    scene, frames = resident.pairs[0]
    taken = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for view in range(_VIEWS):
            residency_render._picture(scene, frames, view, 0.3 * view)  # noqa: SLF001 - without the readback
        taken.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    return round(1e3 * min(taken), 2)


def _pin(count: int) -> float:
    """Return the GB per second at which threads pin pages."""
    import torch

    def pin(_: int) -> list[Any]:
        return [torch.empty(_PAGE, dtype=torch.uint8, pin_memory=True) for _ in range(_PINNED_PAGES // count)]

    began = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        kept = list(pool.map(pin, range(count)))
    took_s = time.perf_counter() - began
    kept.clear()
    torch._C._host_emptyCache()  # noqa: SLF001 - PyTorch would keep the memory pinned
    return round(_PINNED_PAGES * _PAGE / (1 << 30) / took_s, 2)


def process(folder: str, labels: str, number: str) -> dict[str, Any]:
    """Render in a process of its own. Begins when a line arrives on stdin."""
    resident = Resident(Path(folder), [int(number)])
    with tempfile.TemporaryDirectory() as out:
        (Path(out) / "warm").mkdir()
        resident.render(int(number), 5, Path(out) / "warm")
        print("ready", flush=True)
        sys.stdin.readline()
        began = time.perf_counter()
        resident.render(int(number), int(labels), Path(out))
        return {"took_s": time.perf_counter() - began}


def kernels(folder: str, labels: str) -> dict[str, Any]:
    """The time of the kernels of one label, and the longest ones."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    resident = Resident(Path(folder), [0])
    count = max(1, int(labels) // 20)
    with tempfile.TemporaryDirectory() as out:
        (Path(out) / "warm").mkdir()
        resident.render(0, 5, Path(out) / "warm")
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            resident.render(0, count, Path(out))
            torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_bytes())["traceEvents"]
    taken: dict[str, list[float]] = {}
    for event in events:
        if event.get("cat") == "kernel":
            taken.setdefault(event["name"], []).append(float(event["dur"]))
    kernel_ms = sum(map(sum, taken.values())) / 1e3
    longest = sorted(taken.items(), key=lambda item: -sum(item[1]))[:6]
    return {
        "kernels_per_picture": round(sum(map(len, taken.values())) / (count * _VIEWS), 1),
        "kernel_ms_per_picture": round(kernel_ms / (count * _VIEWS), 3),
        "all_pictures_s": round(kernel_ms / 1e3 * _PICTURES / (count * _VIEWS), 1),
        "longest": [f"{sum(own) / 1e3 / (count * _VIEWS):.3f} ms per picture: {name[:110]}" for name, own in longest],
    }


def disk(folder: str) -> dict[str, Any]:
    """GB per second of reading files that are not in the page cache, each file by one thread, or in parts by four."""
    drop_from_cache(Path(folder))
    scenes = [Path(folder) / "scenes" / f"{number}.ply" for number in range(12)]
    whole = [(path, 0, path.stat().st_size) for path in scenes]
    path, _, size = whole[11]
    parts = [(path, size * part // 4, size * (part + 1) // 4) for part in range(4)]
    return {
        "one file, 1 thread": _read_rate(whole[:1]),
        "one file in parts, 4 threads": _read_rate(parts),
        "four files, 4 threads": _read_rate(whole[1:5]),
        "six files, 6 threads": _read_rate(whole[5:11]),
        "one cached file, 1 thread": _read_rate(whole[:1]),
    }


def _read_rate(parts: Sequence[tuple[Path, int, int]]) -> float:
    def read(part: tuple[Path, int, int]) -> int:
        path, at, end = part
        buffer = memoryview(bytearray(_CHUNK))
        file = os.open(path, os.O_RDONLY)
        try:
            while at < end:
                at += os.preadv(file, [buffer[: min(_CHUNK, end - at)]], at)
        finally:
            os.close(file)
        return end - part[1]

    began = time.perf_counter()
    with ThreadPoolExecutor(len(parts)) as pool:
        nbytes = sum(pool.map(read, parts))
    return round(nbytes / (1 << 30) / (time.perf_counter() - began), 2)


def _start(*arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "bench.residency_bound", "--side", *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _result(side: "subprocess.Popen[str]") -> dict[str, Any]:
    output, _ = side.communicate("\n")
    if side.returncode:
        raise SystemExit(f"{' '.join(map(str, side.args))} failed")  # type: ignore[arg-type]
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def _processes(folder: Path, labels: int, count: int) -> dict[str, float]:
    sides = [_start("process", str(folder), str(labels // count), str(number)) for number in range(count)]
    for side in sides:
        assert side.stdout is not None
        side.stdout.readline()
    with ThreadPoolExecutor(count) as pool:
        took_s = max(result["took_s"] for result in pool.map(_result, sides))
    pictures = labels // count * count * _VIEWS
    return {
        "pictures_per_s": round(pictures / took_s, 1),
        "all_pictures_s": round(took_s * _PICTURES / pictures, 1),
    }


_SIDES: dict[str, Callable[..., dict[str, Any]]] = {
    "threads": threads, "process": process, "kernels": kernels, "disk": disk,
}  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    if arguments[0] == "--side":
        print(json.dumps(_SIDES[arguments[1]](*arguments[2:])), flush=True)
        return
    parser = argparse.ArgumentParser(prog="python -m bench.residency_bound")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--labels", type=int, default=200)
    options = parser.parse_args(arguments)
    folder, labels = str(options.folder), str(options.labels)
    began = time.monotonic()
    make(options.folder, Shape())
    print(f"files made in {time.monotonic() - began:.1f} s", flush=True)
    print("kernels:", json.dumps(_result(_start("kernels", folder, labels)), indent=1), flush=True)
    print("threads:", json.dumps(_result(_start("threads", folder, labels, "1", "2", "4")), indent=1), flush=True)
    print("4 processes:", json.dumps(_processes(options.folder, options.labels, 4)), flush=True)
    print("disk, GB/s:", json.dumps(_result(_start("disk", folder)), indent=1), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
