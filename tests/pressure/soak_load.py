"""The load of a soak: jobs of all kinds, `gpuyard run` and scripts that lease RAM and GPU memory.

One action about every 1.5 s, and no new jobs while MOST_JOBS are unfinished. What a program was promised is part of the
name that it writes down: `ram-7:400:0` has 400 MB of RAM and no CPUs of its own.
"""

import random
import re
import sys
import threading
import time
from collections import Counter

from msgspec import Struct

from gpuyard.model.lifecycle import FINISHED
from tests.pressure.hogs import HOG, SCRIPT
from tests.torture.records import Submission
from tests.torture.target import GPUYARD, PYTHON, Target

MOST_JOBS = 16
_MOST_BESIDE = 2
_EVERY_S = (0.5, 2.0)
_IDS = re.compile(r"(\d+)(?:-(\d+))?")
_HANGS_S = 240.0


class _Wanted(Struct, frozen=True, kw_only=True):
    """What a program of the load takes, and what it declares: None is not declared."""

    mb: float
    ram_mb: float | None = None
    vram_mb: float = 0.0
    cpus: int = 0
    has_output: bool = False


class SoakLoad:
    """Submits until it is stopped. `unit_mb` is the size of a large hog."""

    def __init__(self, target: Target, seed: int, unit_mb: float, output_disk_mb: float) -> None:
        self.target = target
        self.submissions: list[Submission] = []
        self.counts: Counter[str] = Counter()
        self._dice = random.Random(f"load {seed}")
        self._unit_mb, self._output_disk_mb = unit_mb, output_disk_mb
        self._is_over = threading.Event()
        self._clients: list[threading.Thread] = []
        self._number = 0
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> int:
        """Submit no more, and return how many clients have not ended after some minutes."""
        self._is_over.set()
        self._thread.join()
        deadline = time.monotonic() + _HANGS_S
        for client in self._clients:
            client.join(max(0.0, deadline - time.monotonic()))
        return sum(client.is_alive() for client in self._clients)

    def _work(self) -> None:
        while not self._is_over.wait(self._dice.uniform(*_EVERY_S)):
            self._clients = [client for client in self._clients if client.is_alive()]
            kind, weight = zip(*_KINDS.items(), strict=True)
            [chosen] = self._dice.choices(kind, weight)
            if chosen in ("run", "script"):
                if len(self._clients) < _MOST_BESIDE:
                    self.counts[chosen] += 1
                    self._start_beside(chosen)
            elif not self._is_full():
                self.counts[chosen] += 1
                self._submit(chosen, self._wanted(chosen))

    def _is_full(self) -> bool:
        counts = self.target.status()
        return counts is None or sum(n for state, n in counts.items() if state not in FINISHED) >= MOST_JOBS

    def _wanted(self, kind: str) -> _Wanted:
        size, vram = self._dice.uniform(0.3, 1.0) * self._unit_mb, self._dice.uniform(2.0, 10.0) * 1024
        return {
            "ram": _Wanted(mb=size, ram_mb=size * 1.1),
            "too-low": _Wanted(mb=size, ram_mb=size * 0.3),
            "undeclared": _Wanted(mb=size),
            "gpu": _Wanted(mb=size * 0.3, vram_mb=vram),
            "gpu-ram": _Wanted(mb=size, ram_mb=size * 1.1, vram_mb=vram),
            "cpu": _Wanted(mb=20.0, cpus=1),
            "output": _Wanted(mb=20.0, has_output=True),
        }[kind]

    def _submit(self, kind: str, wanted: _Wanted) -> None:
        self._number += 1
        submission = Submission(name=f"{kind}-{self._number}")
        self.submissions.append(submission)
        options = ["--vram", f"{wanted.vram_mb:.0f}M"] if wanted.vram_mb else ["--gpus", "0"]
        options += [] if wanted.ram_mb is None else ["--ram", f"{wanted.ram_mb:.0f}M"]
        options += ["--cpus", str(wanted.cpus)] if wanted.cpus else []
        if wanted.has_output:
            path = self.target.work / "output" / f"{submission.name}.txt"
            options += ["--output", str(path), "--min-free-disk", f"{self._output_disk_mb:.0f}M"]
        over_s, hold_s = self._dice.uniform(2.0, 5.0), self._dice.uniform(1.0, 8.0)
        program = self._hog(submission.name, wanted, over_s, hold_s)
        done = self.target.gpuyard("submit", "--name", submission.name, *options, "--", *program)
        submission.text = done.err.strip()
        if done.status == 0 and (match := _IDS.fullmatch(done.out.strip())):
            submission.ids, submission.answer = (int(match[1]),), "accepted"
        elif done.status is not None and done.status != 0:
            submission.answer = "refused"

    def _hog(self, name: str, wanted: _Wanted, over_s: float, hold_s: float) -> list[str]:
        promised = f"{name}:{wanted.ram_mb or 0.0:.0f}:{wanted.cpus}"
        figures = (wanted.mb, over_s, hold_s)
        python = [sys.executable, "-P"] if wanted.vram_mb else PYTHON
        program = [*python, HOG, str(self.target.evidence.path), promised, *(f"{each:.1f}" for each in figures)]
        return [*program, *(["--vram", f"{wanted.vram_mb:.0f}"] if wanted.vram_mb else [])]

    def _start_beside(self, kind: str) -> None:
        self._number += 1
        mb = self._dice.uniform(0.2, 0.45) * self._unit_mb
        name = f"{kind}{self._number}:{mb * 1.2:.0f}:0"
        figures = (f"{mb:.0f}", "4", f"{self._dice.uniform(1.0, 10.0):.1f}")
        evidence = str(self.target.evidence.path)
        if kind == "script":
            vram = self._dice.uniform(2.0, 8.0) * 1024
            command = [sys.executable, SCRIPT, evidence, name, *figures, f"{mb * 1.2:.0f}", f"{vram:.0f}"]
        else:
            options = ["--gpus", "0", "--ram", f"{mb * 1.2:.0f}M"]
            command = [*GPUYARD, "run", *options, "--", *PYTHON, HOG, evidence, name, *figures]
        client = threading.Thread(target=self._run_beside, args=(name, command), daemon=True)
        self._clients.append(client)
        client.start()

    def _run_beside(self, name: str, command: list[str]) -> None:
        done = self.target.run(command, _HANGS_S)
        if done.status != 0:
            self.target.happened.observed.append(f"{name} ended with {done.status}: {done.err.strip()[-300:]}")


# What is done how often.
_KINDS = {
    "ram": 4, "too-low": 1, "undeclared": 2, "gpu": 3, "gpu-ram": 3, "cpu": 2, "output": 2, "run": 1, "script": 1,
}  # fmt: skip
