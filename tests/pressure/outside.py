"""Pressure from outside the queue: RAM, CPU, disks and GPU memory that programs without a lease take and give back.

Each kind has a thread and dice of its own: the same seed plans the same pressure, which meets other jobs.
"""

import contextlib
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.pressure.watch import free_mb
from tests.torture.target import PYTHON, Target

HOG = str(Path(__file__).with_name("hog.py"))
_MB = 1 << 20
# A process of outside pressure is named so in the evidence.
RAM_NAME, GPU_NAME = "outside-ram", "outside-gpu"
# Long enough that all kinds together leave some time for starts.
_PAUSES_S = {"RAM": (2.0, 15.0), "CPU": (15.0, 50.0), "disk": (5.0, 30.0), "GPU": (2.0, 15.0)}
# Of the RAM. With the oldest job, the programs beside the queue and the daemon, the most of it still fits.
_RAM_PARTS = (0.25, 0.45)
_BUSY = "import time\nuntil = time.monotonic() + {seconds}\nwhile time.monotonic() < until: sum(range(1000))"


class OutsidePressure:
    """`disks` are folders with small file systems of their own, and how many MB of each stay free under pressure."""

    def __init__(self, target: Target, seed: int, ram_mb: float, disks: dict[str, tuple[Path, float]]) -> None:
        self.counts: Counter[str] = Counter()
        self._target, self._ram_mb, self._disks, self._seed = target, ram_mb, disks, seed
        self._is_over = threading.Event()
        self._number = 0
        kinds = {"RAM": self._take_ram, "CPU": self._take_cpu, "disk": self._fill_disk, "GPU": self._take_gpu}
        self._threads = [threading.Thread(target=self._repeat, args=each, daemon=True) for each in kinds.items()]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _repeat(self, name: str, act: Callable[[random.Random], None]) -> None:
        dice = random.Random(f"{name} {self._seed}")
        while not self._is_over.wait(dice.uniform(*_PAUSES_S[name])):
            self.counts[name] += 1
            act(dice)

    def _take_ram(self, dice: random.Random) -> None:
        figures = (dice.uniform(*_RAM_PARTS) * self._ram_mb, dice.uniform(4.0, 8.0), dice.uniform(5.0, 15.0))
        self._number += 1
        arguments = [f"{RAM_NAME}{self._number}", *(f"{each:.1f}" for each in figures)]
        self._run([*PYTHON, HOG, str(self._target.evidence.path), *arguments])

    def _take_cpu(self, dice: random.Random) -> None:
        self._run([*PYTHON, "-c", _BUSY.format(seconds=dice.uniform(10.0, 40.0))])

    def _take_gpu(self, dice: random.Random) -> None:
        device, vram_mb, hold_s = dice.choice("01"), dice.uniform(2.0, 20.0) * 1024, dice.uniform(5.0, 30.0)
        name = f"{GPU_NAME}{self.counts['GPU']}"
        figures = ["1", "0", f"{hold_s:.1f}", "--vram", f"{vram_mb:.0f}"]
        command = [sys.executable, "-P", HOG, str(self._target.evidence.path), name, *figures]
        self._run(command, CUDA_VISIBLE_DEVICES=device)

    def _run(self, command: list[str], **more: str) -> None:
        process = subprocess.Popen(
            command, env={**self._target.environment, **more}, cwd="/", stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        while process.poll() is None:
            if self._is_over.wait(0.1):
                process.terminate()
                process.wait()

    def _fill_disk(self, dice: random.Random) -> None:
        folder, left_mb = self._disks[dice.choice(sorted(self._disks))]
        filler = folder / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:  # full already
            while free_mb(folder) > left_mb and not self._is_over.is_set():
                file.write(bytes(min(_MB, max(4096, int((free_mb(folder) - left_mb) * _MB)))))
        self._is_over.wait(dice.uniform(6.0, 20.0))
        filler.unlink(missing_ok=True)
