"""What a snapshot of the code costs: `gpuyard submit` with and without one, in a Git work tree of 1,000 files."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.private_gpuyard import PrivateGpuyard, private_gpuyard

_FOLDERS, _FILES, _LINES = 20, 50, 200
_TIMES = 15
_GIT = ("git", "-c", "user.name=bench", "-c", "user.email=bench@localhost")


def bench_code() -> None:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        tree = make_tree(Path(folder) / "tree")
        with private_gpuyard(Path(folder) / "home", "2x24GB") as gpuyard:
            gpuyard("pause")
            floor = _median_s(lambda: subprocess.run([sys.executable, "-c", "pass"], check=True))
            kinds = {
                "python -c pass": floor,
                "cp -r of the files": _copy_s(tree, Path(folder) / "copies"),
                "submit": _submit_s(gpuyard, tree),
                "submit --snapshot": _submit_s(gpuyard, tree, "--snapshot"),
                "submit --array 0-99": _submit_s(gpuyard, tree, "--array", "0-99"),
                "submit --array 0-99 --snapshot": _submit_s(gpuyard, tree, "--array", "0-99", "--snapshot"),
            }
            print(f"{'Git work tree of 1,000 files of 4 kB':<44}{'median':>9}")
            for what, seconds in kinds.items():
                print(f"{what:<44}{seconds * 1e3:6.1f} ms{seconds / floor:9.2f} x python")
            added = kinds["submit --snapshot"] - kinds["submit"]
            copy = kinds["cp -r of the files"]
            print(f"{'a snapshot adds':<44}{added * 1e3:6.1f} ms{added / copy:9.2f} x cp")


def make_tree(root: Path) -> Path:
    for number in range(_FOLDERS):
        (root / f"part{number}").mkdir(parents=True)
        for each in range(_FILES):
            (root / f"part{number}" / f"module{each}.py").write_text(f"value = {each:10}\n" * _LINES)
    (root / "train.py").write_text("print('trained')\n")
    for arguments in (("init", "--quiet"), ("add", "."), ("commit", "--quiet", "--message", "bench")):
        subprocess.run([*_GIT, *arguments], cwd=root, check=True)
    return root


def _copy_s(tree: Path, copies: Path) -> float:
    """Return how long the same copies take without gpuyard: what the disk and the kernel allow."""
    copies.mkdir()
    names = (str(copies / str(number)) for number in range(_TIMES))
    os.sync()

    def copy() -> None:
        subprocess.run(["cp", "-r", *sorted(map(str, tree.glob("part*"))), _made(next(names))], check=True)

    return _median_s(copy)


def _made(folder: str) -> str:
    os.mkdir(folder)
    return folder


def _submit_s(gpuyard: PrivateGpuyard, tree: Path, *options: str) -> float:
    command = [gpuyard.command, "submit", "--gpus", "0", *options, "--", "python", "train.py"]
    os.sync()  # what was written before is not paid for here

    def submit() -> None:
        subprocess.run(command, cwd=tree, env=gpuyard.env, check=True, stdout=subprocess.DEVNULL)

    return _median_s(submit)


def _median_s(call: Callable[[], object]) -> float:
    taken = []
    for _ in range(_TIMES):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)
