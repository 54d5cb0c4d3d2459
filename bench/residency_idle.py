"""Why the card idles in `python -m bench.residency`: one run that compares causes on the same machine. On a real card:

    python -m bench.residency_idle FOLDER [--parts resident,workers,changes,pinning,…] [--json FILE]

Makes the files of `bench.residency` (31 GB). All runs but `whole` and `before` read them from the page cache and stop
12 s after the first label. All parts take about nine minutes after the files are made.

- `resident`: everything is in VRAM. The bound of launches, by number of threads, with CUDA graphs, and beside pinning,
  reading, uploads and syncs.
- `workers`: residency with 1, 2, 3, 4 and 6 workers.
- `changes`: one change each: 4 workers, CUDA graphs, fewer threads that sync, no syncs, VRAM for everything.
- `pinning`: no change; smaller and larger slabs of pinned memory; memory pinned by PyTorch.
- `depth`: assets of at most 1, 2 or 4 units are loaded ahead of time.
- `transfers`: nothing is rendered: the bound of reading, pinning and uploading.
- `whole`: a complete run from files that are not cached, with its start and its end.
- `before`: the same with 4 workers and memory pinned by PyTorch.

`card idle` is 1 - pictures * (busy time of the card per picture) / time, from the first label to the last. The busy
time is measured by `resident` with one thread. So gaps between kernels count, which NVML's samples do not show.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.idle_run import Variant, run
from bench.residency import TINY
from bench.residency_data import Shape, drop_from_cache, make

_PARTS = "resident,workers,changes,pinning,depth,transfers,whole,before"
_COLD = ("whole", "before")
_SECONDS = 12.0
_LABELS = 96  # per measurement of `resident`
_BUSY_MS = 1.53  # per picture, where `resident` was not measured


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self._folder: Path = options.folder
        self._is_tiny = options.tiny
        self._base = Variant(
            device="host" if options.tiny else "cuda",
            vram="5M" if options.tiny else "12G",
            ram="3M" if options.tiny else "20G",
            seconds=1.0 if options.tiny else _SECONDS,
        )
        self._busy_ms = _BUSY_MS
        self._json: Path | None = options.json
        self.results: dict[str, dict[str, Any]] = {}

    def run(self, parts: Sequence[str]) -> None:
        for part in parts:
            if part == "resident":
                self._add("resident", self._side("resident", str(self._folder), str(_LABELS)))
                self._learn_busy()
                continue
            for name, variant in self._variants(part).items():
                self._add(name, self._measure(variant, is_cold=part in _COLD))

    def _variants(self, part: str) -> dict[str, Variant]:
        change, base = msgspec.structs.replace, self._base
        parts = {
            "workers": {f"{workers} workers": change(base, workers=workers) for workers in (1, 2, 3, 4, 6)},
            "changes": self._changes(),
            "pinning": {
                "as it is": base,
                **{f"slabs of {size} MB": change(base, slab_mb=size) for size in (4, 64)},
                "memory pinned by PyTorch": change(base, pages="pytorch"),
            },
            "depth": {f"{depth} units ahead": change(base, depth=depth) for depth in (1, 2, 4)},
            "transfers": {"transfers only": change(base, renderer="nothing")},
            "whole": {"whole run": change(base, seconds=None)},
            "before": {"whole run as before": change(base, seconds=None, workers=4, pages="pytorch")},
        }
        if part not in parts:
            raise SystemExit(f"there is no part '{part}'; the parts are {_PARTS}")
        return parts[part]

    def _changes(self) -> dict[str, Variant]:
        change, base = msgspec.structs.replace, self._base
        # Each graph keeps its temporary memory: more VRAM, of which as much is left for assets.
        graphs = {} if self._is_tiny else {"graphs": change(base, vram="15G", renderer="graphs", working="4G")}
        return {
            "with 4 workers": change(base, workers=4),
            **graphs,
            "4 threads that sync": change(base, writers=4),
            "no syncs": change(base, syncs=False),
            "VRAM for everything": change(base, vram="60M" if self._is_tiny else "60G"),
        }

    def _measure(self, variant: Variant, *, is_cold: bool) -> dict[str, Any]:
        out = self._folder / "out" / "idle"
        shutil.rmtree(out, ignore_errors=True)
        if is_cold:
            drop_from_cache(self._folder)
        spawned = time.time()
        figures = self._side("run", str(self._folder), str(out), str(spawned), msgspec.json.encode(variant).decode())
        ended = time.time()
        if "failed" in figures:
            return figures
        figures["phases_s"]["exit"] = round(ended - figures.pop("ended"), 2)
        figures["took_s"] = round(ended - spawned, 2)
        if variant.renderer != "nothing" and variant.device == "cuda":
            busy_s = figures["pictures"] * self._busy_ms / 1e3
            figures["card_idle_percent"] = round(100 * (1 - busy_s / figures["work_s"]), 1)
            figures["with_start_and_end_percent"] = round(100 * (1 - busy_s / figures["took_s"]), 1)
        return figures

    def _side(self, *arguments: str) -> dict[str, Any]:
        """Run a process, pass on what it prints but its last line, and return that. A failure is a result."""
        command = [sys.executable, "-m", "bench.residency_idle", "--side", *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as side:
            assert side.stdout is not None
            last = ""
            for line in side.stdout:
                if last:
                    print(last, flush=True)
                last = line.rstrip("\n")
        if side.returncode:
            return {"failed": f"exit status {side.returncode}"}
        figures: dict[str, Any] = json.loads(last)
        return figures

    def _learn_busy(self) -> None:
        profile = self.results["resident"].get("profile, 1 threads", {})
        self._busy_ms = profile.get("busy_ms_per_picture", _BUSY_MS)

    def _add(self, name: str, figures: dict[str, Any]) -> None:
        self.results[name] = figures
        if name != "resident":
            print(f"{name}: {json.dumps(figures)}", flush=True)
        if self._json is not None:
            self._json.write_text(json.dumps(self.results, indent=1))


_COLUMNS = {
    "pictures/s": "pictures_per_s", "card idle %": "card_idle_percent",
    "with start and end %": "with_start_and_end_percent", "NVML idle %": "idle_percent", "s": "took_s",
}  # fmt: skip


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = [["", *_COLUMNS, "queueing ms", "of which waiting", "lock wait us", "start s", "exit s"]]
    lines.append(["---"] * len(lines[0]))
    for name, figures in results.items():
        if "phases_s" not in figures:
            continue
        phases, issue = figures["phases_s"], figures["issue"]
        cells = [figures.get(key) for key in _COLUMNS.values()]
        cells += [issue.get("wall_ms"), issue.get("waiting_ms"), figures["lock_wait_us"].get("mean")]
        cells += [round(sum(list(phases.values())[:3]), 2), phases["exit"]]
        lines.append([name, *("?" if cell is None else str(cell) for cell in cells)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _run_side(name: str, *arguments: str) -> dict[str, Any]:
    if name == "resident":
        from bench.idle_resident import resident

        return resident(*arguments)
    folder, out, spawned, variant = arguments
    return run(folder, out, float(spawned), msgspec.json.decode(variant, type=Variant))


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["--side"]:
        print(json.dumps(_run_side(*arguments[1:])), flush=True)
        return
    parser = argparse.ArgumentParser(prog="python -m bench.residency_idle")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", default=_PARTS)
    parser.add_argument("--tiny", action="store_true", help="small files, in the host's memory; without `resident`")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    make(options.folder, TINY if options.tiny else Shape())
    print(f"files made in {time.monotonic() - began:.1f} s", flush=True)
    bench = Bench(options)
    bench.run([part for part in options.parts.split(",") if not (options.tiny and part == "resident")])
    print(table(bench.results))


if __name__ == "__main__":
    main(sys.argv[1:])
