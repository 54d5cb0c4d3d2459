"""Rendering with residency, compared with one process per scene that loads, renders and exits. On a real card:

    python -m bench.residency FOLDER [--only copy,ours,serial,parallel] [--json FILE]

Writes 32 GB of files (see the options) and all outputs to the folder; existing files are reused. Each pass begins with
none of them in the page cache. All passes draw the same pictures with the same renderer, which is checked byte by byte.
`--tiny` takes seconds, for machines without a card.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from msgspec.structs import replace

from bench.residency_data import Shape, drop_from_cache, make
from gpuyard.errors import ProbeError
from gpuyard.recipes.render.planning.assets_and_units import DEFAULT_WORKERS

TINY = Shape(scenes=4, scene_mb=1, actors=3, frames=3, frame_mb=0.1, pairs=8, labels=24, views=2)
_SAMPLE_S = 0.05
_GB = 1 << 30
_AT_ONCE = 4


class CardMonitor:
    """Samples the first card in a thread. Without a card, all figures are None."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, float, float]] = []  # wall clock, load in percent, used MB
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _sample(self) -> None:
        from gpuyard.probes.nvidia.nvml import Nvml

        probe = Nvml()
        while not self._is_over.wait(_SAMPLE_S):
            try:
                card = probe.read(5).devices[0]
            except (ProbeError, IndexError):
                return
            self.samples.append((time.time(), card.utilization_percent or 0.0, card.memory_used_mb or 0.0))

    def figures(self) -> dict[str, float | None]:
        if not self.samples:
            return {"idle_percent": None, "load_percent": None, "card_gb": None}
        loads = [load for _, load, _ in self.samples]
        return {
            "idle_percent": round(100 * sum(load == 0 for load in loads) / len(loads), 1),
            "load_percent": round(sum(loads) / len(loads), 1),
            "card_gb": round(max(used_mb for *_, used_mb in self.samples) * 1048576 / _GB, 2),
        }


class Bench:
    def __init__(self, options: argparse.Namespace, shape: Shape) -> None:
        self._options, self._shape = options, shape
        self._folder: Path = options.folder
        self._device = "host" if options.tiny else "cuda"

    def copy(self) -> dict[str, Any]:
        return _result(_start("copy"))

    def ours(self) -> dict[str, Any]:
        budgets = (self._options.vram, self._options.ram, str(self._options.workers))
        return self._pass("ours", lambda out: [_result(_start("ours", str(self._folder), out, self._device, *budgets))])

    def serial(self) -> dict[str, Any]:
        return self._pass("serial", lambda out: self._scene_by_scene(out, 1))

    def parallel(self) -> dict[str, Any]:
        return self._pass("parallel", lambda out: self._scene_by_scene(out, _AT_ONCE))

    def _scene_by_scene(self, out: str, at_once: int) -> list[dict[str, Any]]:
        """Run a process per scene, `at_once` at a time."""
        names = [f"scenes/{n}.ply" for n in range(self._shape.scenes)]

        def run(name: str) -> dict[str, Any]:
            return _result(_start("scene", str(self._folder), out, self._device, name))

        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(run, names))

    def _pass(self, name: str, work: Callable[[str], list[dict[str, Any]]]) -> dict[str, Any]:
        out = self._folder / "out" / name
        shutil.rmtree(out, ignore_errors=True)
        drop_from_cache(self._folder)
        began = time.monotonic()
        with CardMonitor() as monitor:
            results = work(str(out))
        took_s = time.monotonic() - began
        return {
            "took_s": round(took_s, 1),
            **monitor.figures(),
            "labels": sum(result["labels"] for result in results),
            "read_gb": _gb(sum(result["read"] for result in results)),
            "uploaded_gb": _gb(sum(result["uploaded"] for result in results)),
            "downloaded_gb": _gb(sum(result.get("downloaded", 0) for result in results)),
            "allocated_gb": _most(results, "allocated"),
            "reserved_gb": _most(results, "reserved"),
            "digest": _digest(out),
            "details": results[0].get("details"),
        }


def _start(*arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "bench.residency_side", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _result(process: "subprocess.Popen[str]") -> dict[str, Any]:
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(map(str, process.args))} failed")  # type: ignore[arg-type]
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def _gb(nbytes: float) -> float:
    return round(nbytes / _GB, 3)


def _most(results: Iterable[dict[str, Any]], key: str) -> float | None:
    """Return the highest figure of any process."""
    known = [result[key] for result in results if result[key] is not None]
    return _gb(max(known)) if known else None


def _digest(out: Path) -> str:
    """Return a digest of all pictures and the names of their labels."""
    digest = hashlib.sha256()
    for path in sorted(out.glob("*/views.npy")):
        digest.update(path.parent.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


_COLUMNS = {
    "s": "took_s", "labels": "labels", "card idle %": "idle_percent", "card busy %": "load_percent",
    "read GB": "read_gb", "uploaded GB": "uploaded_gb", "back GB": "downloaded_gb",
    "allocated GB": "allocated_gb", "reserved GB": "reserved_gb", "card GB": "card_gb", "pictures": "digest",
}  # fmt: skip
_TITLES = {"ours": "gpuyard render", "serial": "a process per scene", "parallel": f"the same, {_AT_ONCE} at a time"}


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = [["", *_COLUMNS], ["---"] * (len(_COLUMNS) + 1)]
    for name, title in _TITLES.items():
        if name in results:
            lines.append([title, *(_cell(results[name][key]) for key in _COLUMNS.values())])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(value: object) -> str:
    return "?" if value is None else str(value)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.residency")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="copy,ours,serial,parallel", help="passes, in this order")
    parser.add_argument("--tiny", action="store_true", help="small files, in the host's memory")
    parser.add_argument("--vram", help="VRAM budget of gpuyard; default 12G, 5M with --tiny")
    parser.add_argument("--ram", help="RAM budget of gpuyard; default 20G, 3M with --tiny")
    parser.add_argument("--workers", type=int, default=DEFAULT_WORKERS)
    parser.add_argument("--json", type=Path, help="add the figures to this file")
    for field, default in zip(Shape.__struct_fields__, Shape.__struct_defaults__, strict=True):
        parser.add_argument(f"--{field.replace('_', '-')}", type=type(default), help=str(default))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    options = _parse(arguments)
    given = {field: getattr(options, field) for field in Shape.__struct_fields__}
    shape = replace(TINY if options.tiny else Shape(), **{name: value for name, value in given.items() if value})
    options.vram = options.vram or ("5M" if options.tiny else "12G")
    options.ram = options.ram or ("3M" if options.tiny else "20G")
    began = time.monotonic()
    make(options.folder, shape)
    made_s = time.monotonic() - began
    print(
        f"{_gb(shape.nbytes)} GB of files made in {made_s:.1f} s; budget {options.vram}, {options.ram} RAM", flush=True
    )
    kept = options.json is not None and options.json.exists()
    results: dict[str, dict[str, Any]] = json.loads(options.json.read_text()) if kept else {}
    bench = Bench(options, shape)
    for name in options.only.split(","):
        if name == "copy" and options.tiny:
            continue
        results[name] = getattr(bench, name)()
        print(f"{name}: {json.dumps(results[name])}", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=1))
    print(table(results))


if __name__ == "__main__":
    main(sys.argv[1:])
