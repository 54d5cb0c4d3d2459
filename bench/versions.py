"""This version compared with another one: start of commands, memory of an idle daemon, jobs per second, hand-over.

`python -m bench versions PATH` takes the `gpuyard` command of the other version's environment. The versions take turns
in every round, so that a slow minute of the machine affects both.
"""

import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.private_gpuyard import GPUYARD, private_gpuyard
from bench.queue import process_s, resident_bytes
from bench.work import compile_stamp, gaps_s

_ROUNDS = 5
_COMMANDS = 10
_JOBS = 1000
_HAND_OVERS = 200
_IDLE_S = 5.0  # until a daemon has started all of its threads and read the devices
Figures = dict[str, float]


def bench_versions(others: Sequence[str]) -> None:
    if len(others) != 1 or not Path(others[0]).is_file():
        raise SystemExit("usage: python -m bench versions PATH, the `gpuyard` command of another version")
    commands = {"other": others[0], "this": GPUYARD}
    taken: dict[str, list[Figures]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        stamp = compile_stamp(Path(scratch))
        for number in range(_ROUNDS):
            for name, command in commands.items():
                taken[name].append(_measure(command, Path(scratch) / f"{name}-{number}", stamp))
    print(f"medians of {_ROUNDS} rounds{'other':>27}{'this':>12}{'ratio':>9}")
    for figure in taken["this"][0]:
        other, this = (statistics.median(round_[figure] for round_ in taken[name]) for name in commands)
        print(f"{figure:<34}{other:12.2f}{this:12.2f}{this / other:9.2f}")


def _measure(command: str, folder: Path, stamp: Sequence[str]) -> Figures:
    folder.mkdir()
    figures = {}
    with private_gpuyard(folder / "idle", "2x24GB", command) as gpuyard:
        time.sleep(_IDLE_S)
        figures["idle daemon, MB"] = resident_bytes(gpuyard.status()["pid"]) / 1e6
        gpuyard("pause")
        for verb in (("submit", "--", "true"), ("queue",)):
            run = (command, *verb)
            seconds = [process_s(gpuyard, run) for _ in range(_COMMANDS)]
            figures[f"gpuyard {verb[0]}, ms"] = statistics.median(seconds) * 1e3
    figures["gpuyard --version, ms"] = 1e3 * statistics.median(
        _seconds(lambda: subprocess.run([command, "--version"], check=True, stdout=subprocess.DEVNULL))
        for _ in range(_COMMANDS)
    )
    with private_gpuyard(folder / "jobs", "2x24GB", command) as gpuyard:
        array = ("submit", "--array", f"0-{_JOBS - 1}", "--", shutil.which("true") or "true")
        figures["jobs per second, 2 GPUs"] = _JOBS / _seconds(lambda: (gpuyard(*array), gpuyard("wait")))
    stamps = folder / "stamps"
    with private_gpuyard(folder / "hand-over", "1x24GB", command) as gpuyard:
        gpuyard("submit", "--array", f"0-{_HAND_OVERS - 1}", "--", *stamp, str(stamps))
        gpuyard("wait")
    figures["hand-over, ms"] = statistics.median(gaps_s(stamps, _HAND_OVERS)) * 1e3
    return figures


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
