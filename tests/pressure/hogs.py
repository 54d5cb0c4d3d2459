"""`scripts/hogs`: real memory hogs against a queue in a memory control group, by how much of their RAM is known.

Each phase queues more hogs than fit at once. One mixes all kinds beside scripts and `gpuyard run` that reserve RAM, and
one lets a program of `gpuyard run` take more than it declared beside a younger job. The kernel's own count says whether
it killed any; what the hogs wrote down says which of them ended well.
"""

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from gpuyard.model.lifecycle import FINISHED
from gpuyard.model.units import format_size, parse_size
from tests.pressure.limited_group import LimitedGroup, in_limited_group
from tests.pressure.watch import MachineWatch
from tests.torture.evidence import read_runs
from tests.torture.own_processes import can_unshare, run_in_namespace
from tests.torture.records import Records, read_records
from tests.torture.target import GPUYARD, PYTHON, Target

HOG, SCRIPT = (str(Path(__file__).with_name(name)) for name in ("hog.py", "script.py"))
_CONFIG = '[queue]\ncpu_jobs = 16\n[host]\nmin_free_disk = "0"\n'
_RAMP_S, _HOLD_S = 5.0, (1.0, 4.0)
# Sizes of hogs, and how many of each kind are queued at once: as parts of the RAM of the group.
_SIZES = (0.12, 0.25)
_PHASE_WITHIN_S = 1200.0
_FLOOR_PART, _LARGEST_FLOOR_MB, _LEAST_PART = 0.25, 2048.0, 0.05
_INTERPRETER_MB = 64.0
# Both leave less than the floor, which is a quarter.
_OUTGROWN, _BESIDE_OUTGROWN, _OUTGROWS_S = 0.6, 0.25, 15.0
_BESIDE = ("script", "run")


class KindCount(Struct, kw_only=True):
    """A row of the table."""

    kind: str
    phase: str
    jobs: int = 0
    runs: int = 0
    ended_well: int = 0
    requeued: int = 0
    kernel_kills: int = 0
    lowest_mb: float = 0.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/hogs", description="Memory hogs against a queue in a control group.")
    parser.add_argument("--ram", default="6G", help="RAM of the control group [6G]")
    parser.add_argument("--each", type=int, default=16, help="hogs of each kind [16]")
    parser.add_argument("--seed", type=int, default=1, help="same seed, same sizes [1]")
    parser.add_argument("--phases", default="", metavar="NAMES", help="only these, by comma")
    parser.add_argument("--work", type=Path, default=None, help="folder to work in [a new one in /tmp]")
    parser.add_argument("--keep", action="store_true", help="keep the folder if all went well, too")
    options = parser.parse_args()
    if can_unshare():
        return run_in_namespace("tests.pressure.hogs", sys.argv[1:])
    return in_limited_group("hogs", parse_size(options.ram), None, lambda outer, group: run(options, outer, group))


def run(options: argparse.Namespace, outer: int, group: LimitedGroup) -> int:
    work = options.work or Path(tempfile.mkdtemp(prefix="gpuyard-hogs-"))
    work.mkdir(parents=True, exist_ok=True)
    group.enter()
    target = Target(work, outer, is_mounted=False, injector=None)
    target.prepare(0.0, _CONFIG)
    herd = _Herd(target, group, random.Random(options.seed), options.each)
    chosen = [name.strip() for name in options.phases.split(",") if name.strip()] or list(herd.phases)
    unknown = [name for name in chosen if name not in herd.phases]
    if unknown:
        _say(f"no such phase: {', '.join(unknown)}; there are {', '.join(herd.phases)}")
        return 1
    for name in chosen:
        herd.run_phase(name)
    faults = herd.finish()
    _say(herd.table())
    for fault in faults:
        _say(f"fault: {fault}")
    target.close()
    if faults or options.keep:
        _say(f"kept: {work}")
    else:
        shutil.rmtree(work, ignore_errors=True)
    return 1 if faults else 0


class _Herd:
    """Submits hogs in phases, and counts what became of them."""

    def __init__(self, target: Target, group: LimitedGroup, dice: random.Random, each: int) -> None:
        self._target, self._group, self._dice, self._each = target, group, dice, each
        self._watch = MachineWatch(group)
        self._seen: list[list[str]] = []  # commands of hogs that declared nothing, which the queue has learned
        self._beside: dict[str, subprocess.Popen[bytes]] = {}
        self._rows: dict[str, KindCount] = {}
        self._faults: list[str] = []
        self._phase = ""
        self._lowest: dict[str, tuple[float, int]] = {}
        self.phases: dict[str, Callable[[], None]] = {
            "declared": lambda: self._submit("declared", each),
            "too-low": lambda: self._submit("too-low", each),
            "undeclared": lambda: self._submit("undeclared", each),
            "learned": lambda: self._submit("learned", each),
            "mixed": self._mix,
            "outgrown": self._outgrow,
        }

    @property
    def floor_mb(self) -> float:
        total = self._group.total_mb
        return min(max(_LARGEST_FLOOR_MB, _LEAST_PART * total), _FLOOR_PART * total)

    def run_phase(self, name: str) -> None:
        began, kills, self._phase = time.monotonic(), self._group.kernel_kills(), name
        self.phases[name]()
        self._wait(began)
        lowest, killed = self._watch.lowest_mb(began), self._group.kernel_kills() - kills
        self._lowest[name] = lowest, killed
        _say(f"{name}: {time.monotonic() - began:.0f} s, lowest available RAM {lowest:.0f} MB, {killed} kernel kills")

    def _mix(self) -> None:
        few = max(1, self._each // 2)
        for index in range(few):
            for kind in ("declared", "too-low", "undeclared", "learned"):
                self._submit(f"mixed-{kind}", 1)
            if index % 2 == 0:
                self._start_beside(_BESIDE[index // 2 % 2])

    def _outgrow(self) -> None:
        """Start a program with `gpuyard run` that takes six times what it declared, and one job after it."""
        total = self._group.total_mb
        began = time.monotonic()
        self._start_beside("outgrown", declared_mb=0.1 * total, mb=_OUTGROWN * total, over_s=_OUTGROWS_S)
        while "start outgrown1 " not in self._target.evidence.path.read_text() and time.monotonic() < began + 60.0:
            time.sleep(0.1)
        self._submit("beside-outgrown", 1)

    def _submit(self, kind: str, count: int) -> None:
        for _ in range(count):
            row = self._rows.setdefault(kind, KindCount(kind=kind, phase=self._phase))
            row.jobs += 1
            name = f"{kind}-{row.jobs}"
            command, mb = self._command(kind, name, row.jobs)
            share = {"declared": 1.1, "too-low": 0.2}.get(kind.removeprefix("mixed-"))
            declared = [] if share is None else ["--ram", f"{mb * share:.0f}M"]
            gpu = ["--gpus", "0"] if row.jobs % 2 else ["--vram", "1G"]
            done = self._target.gpuyard("submit", "--name", name, *gpu, *declared, "--", *command)
            if done.status != 0:
                self._faults.append(f"{name} was not accepted: {done.err.strip()}")

    def _command(self, kind: str, name: str, number: int) -> tuple[list[str], float]:
        """Return the command of a hog and its MB: one that the queue has seen before if it is to know it."""
        if kind.endswith("learned") and self._seen:
            return self._seen[(number - 1) % len(self._seen)], 0.0
        mb = self._group.total_mb * self._dice.uniform(*_SIZES)
        hold_s = self._dice.uniform(*_HOLD_S)
        if kind == "beside-outgrown":  # it still runs when the other program has outgrown
            mb, hold_s = _BESIDE_OUTGROWN * self._group.total_mb, _OUTGROWS_S
        command = [*PYTHON, HOG, str(self._target.evidence.path), name, f"{mb:.0f}", f"{_RAMP_S:g}", f"{hold_s:.1f}"]
        if kind == "undeclared":
            self._seen.append(command)
        return command, mb

    def _start_beside(
        self, kind: str, *, mb: float | None = None, declared_mb: float | None = None, over_s: float = _RAMP_S
    ) -> None:
        row = self._rows.setdefault(kind, KindCount(kind=kind, phase=self._phase))
        row.jobs += 1
        name = f"{kind}{row.jobs}"
        mb = mb or self._group.total_mb * _SIZES[0]
        declared = f"{declared_mb or mb * 1.2 + _INTERPRETER_MB:.0f}"
        evidence, figures = str(self._target.evidence.path), (f"{mb:.0f}", f"{over_s:g}", f"{_HOLD_S[1]:g}")
        if kind == "script":
            command = [sys.executable, SCRIPT, evidence, name, *figures, declared, "1024"]
        else:
            options = ["--gpus", "0", "--ram", f"{declared}M"]
            command = [*GPUYARD, "run", *options, "--", *PYTHON, HOG, evidence, name, *figures]
        with (self._target.work / f"{name}.log").open("wb") as log:
            self._beside[name] = subprocess.Popen(
                command, env=self._target.environment, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _wait(self, began: float) -> None:
        while time.monotonic() < began + _PHASE_WITHIN_S:
            counts = self._target.status()
            is_idle = counts is not None and not any(n for state, n in counts.items() if state not in FINISHED)
            if is_idle and all(each.poll() is not None for each in self._beside.values()):
                return
            time.sleep(0.2)
        self._faults.append(f"after {_PHASE_WITHIN_S:.0f} s not all hogs have ended: {self._target.status()}")

    def finish(self) -> list[str]:
        """Stop the daemon, count everything, and return what is wrong."""
        self._target.gpuyard("daemon", "stop")
        self._watch.stop()
        records = read_records(self._target.home / "queue.db")
        self._count(records)
        for name, process in self._beside.items():
            if process.poll() != 0:
                self._faults.append(f"{name} ended with {process.poll()}: see {name}.log")
        for job in records.jobs.values():
            if job.state != "succeeded":
                self._faults.append(f"job {job.id} ({job.name}) is {job.state}: {job.reason}")
        outgrown = self._rows.get("beside-outgrown")
        if outgrown is not None and not outgrown.requeued:
            self._faults.append("no job made way for an older program that outgrew its declared RAM")
        for name in self._beside:
            log = (self._target.work / f"{name}.log").read_text()
            if ("of RAM, more than" in log) != name.startswith("outgrown"):
                self._faults.append(f"{name} was warned wrongly, or not at all: {log or 'no warning'}")
        if kills := self._group.kernel_kills():
            self._faults.append(f"the kernel killed {kills} processes")
        return self._faults

    def _count(self, records: Records) -> None:
        runs = read_runs(self._target.evidence.lines())
        for each in runs:
            if each.attempt is None:
                kind = each.run.rstrip("0123456789")
            else:
                kind = records.jobs[each.attempt[0]].name.rpartition("-")[0]
            row = self._rows[kind]
            row.runs += 1
            row.ended_well += each.status == 0
        for attempt in records.attempts.values():
            row = self._rows[records.jobs[attempt.job].name.rpartition("-")[0]]
            row.requeued += attempt.kind == "host-guard"
            if attempt.kind not in ("succeeded", "host-guard"):
                self._faults.append(f"attempt {attempt.name} is {attempt.kind}: {attempt.reason}")
        for row in self._rows.values():
            row.lowest_mb, row.kernel_kills = self._lowest[row.phase]
            if row.ended_well != row.jobs:
                self._faults.append(f"{row.kind}: {row.ended_well} of {row.jobs} ended well by their own evidence")

    def table(self) -> str:
        lines = [
            "| kind | hogs | runs | ended well | requeued by the guard | kernel kills | lowest available RAM |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        for row in self._rows.values():
            low = f"{format_size(row.lowest_mb)} of {format_size(self.floor_mb)}"
            figures = (row.jobs, row.runs, row.ended_well, row.requeued, row.kernel_kills, low)
            lines.append(f"| {row.kind} | {' | '.join(map(str, figures))} |")
        runs = sum(row.runs for row in self._rows.values())
        lines.append(f"{runs} runs, the kernel killed {self._group.kernel_kills()} processes")
        return "\n".join(lines)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
