"""The programs that the residency benchmark compares. Each runs as a separate process, and prints a line of JSON last.

python -m bench.residency_side ours FOLDER OUT DEVICE VRAM RAM WORKERS
python -m bench.residency_side scene FOLDER OUT DEVICE SCENE     load one scene, render its labels, exit
python -m bench.residency_side copy                              speed of pinning, and of copies from pinned memory
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import to_builtins

from bench.residency_render import render_label

_MB = 1048576
_COPIED = 2048 * _MB


def ours(folder: str, out: str, device: str, *settings: str) -> dict[str, Any]:
    from gpuyard.recipes.render.manifest import read
    from gpuyard.residency import Coordinator

    vram, ram, workers = settings
    units = read(str(Path(folder) / "manifest.jsonl")).units
    with Coordinator(vram=vram, ram=ram, workers=int(workers), device=device) as coordinator:
        report = coordinator.run(units, render_label, out)
        status = report.status
        moved = status.moved
        return {
            "labels": status.rendered,
            "read": moved.read_from_disk,
            "uploaded": moved.uploaded + moved.streamed,
            "downloaded": moved.downloaded,
            "details": {"counts": to_builtins(status.counts), "stalls_s": status.stalls_s, "skipped": status.skipped},
            **_peaks(device, status.vram.peak_allocator),
        }


def _peaks(device: str, allocated: int | None) -> dict[str, int | None]:
    """Return the peaks of PyTorch's allocator, or on the host of the simulated device's."""
    if device != "cuda":
        return {"allocated": allocated, "reserved": allocated}
    import torch

    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


class Cloud:
    """The vertices of a PLY file as rows, as a plain script would load them."""

    def __init__(self, path: Path, device: str, count: Callable[[int], None]) -> None:
        with open(path, "rb") as file:
            header = [line.split() for line in iter(lambda: file.readline().strip(), b"end_header")]
            start = file.tell()
        properties = [line for line in header if line[0] == b"property"]
        self._columns = {line[2].decode(): n for n, line in enumerate(properties)}
        rows = np.fromfile(path, np.float32, offset=start).reshape(-1, len(self._columns))
        count(rows.nbytes)
        self._rows: Any = rows
        if device == "cuda":
            import torch

            self._rows = torch.from_numpy(rows).to("cuda")

    def columns(self, *names: str) -> Any:
        first = self._columns[names[0]]
        return self._rows[:, first : first + len(names)]


def scene(folder: str, out: str, device: str, name: str) -> dict[str, Any]:
    """Render the scene's labels in the manifest's order. An actor is kept until another one is needed."""
    moved = [0]

    def count(nbytes: int) -> None:
        moved[0] += nbytes

    lines = (Path(folder) / "manifest.jsonl").read_text().splitlines()
    entries = [entry for entry in map(json.loads, lines) if entry["scene"] == name]
    cloud = Cloud(Path(folder) / name, device, count)
    labels = 0
    frames: list[Cloud] = []
    for entry in entries:
        frames.clear()
        files = sorted((Path(folder) / entry["actor"]).iterdir(), key=lambda path: int(path.stem))
        frames.extend(Cloud(path, device, count) for path in files)
        for label in entry["labels"]:
            target = Path(out) / label["name"]
            target.mkdir(parents=True)
            render_label(cloud, frames, label, target)
            labels += 1
    is_cuda = device == "cuda"
    return {"labels": labels, "read": moved[0], "uploaded": moved[0] if is_cuda else 0, **_peaks(device, None)}


def copy() -> dict[str, Any]:
    """Return GB per second of pinning pages, of one plain copy of 2 GB of pinned memory, and of uploading 2 GB of pages
    and downloading them."""
    from gpuyard.recipes.render.memory.device_memory import LARGEST
    from gpuyard.recipes.render.memory.leased_memory import open_device

    with open_device(3 * _COPIED, "cuda") as memory:
        import torch

        began = time.perf_counter()
        pages = [memory.page(LARGEST) for _ in range(_COPIED // LARGEST)]
        pinning_s = time.perf_counter() - began
        buffer, target = memory.allocate(_COPIED), torch.empty(_COPIED, dtype=torch.uint8, device="cuda")
        plain = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=True)

        def one_copy() -> None:
            target.copy_(plain, non_blocking=True)
            torch.cuda.synchronize()

        return {
            "pinning": _rate(pinning_s),
            "one copy": _rate(_best_s(one_copy)),
            "pages": _rate(_best_s(lambda: memory.upload(pages, buffer))),
            "pages back": _rate(_best_s(lambda: memory.download(buffer, pages))),
        }


def _best_s(work: Callable[[], None]) -> float:
    taken = []
    for _ in range(5):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return min(taken)


def _rate(seconds: float) -> float:
    return round(_COPIED / (1 << 30) / seconds, 1)


if __name__ == "__main__":
    sides: dict[str, Callable[..., dict[str, Any]]] = {"ours": ours, "scene": scene, "copy": copy}
    print(json.dumps(sides[sys.argv[1]](*sys.argv[2:])), flush=True)
