"""Batches of the stand-in simulator: a daemon that sees only this test's use of CPU and RAM, programs that load the
machine, and readers of the results.

The load of the rest of the machine must not affect a test. So the daemon of these tests measures only the processes
with the test's GPUYARD_HOME: its CPU load is the number of those that are runnable, and its used RAM is what they hold.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from gpuyard.recipes.batch.finish import Summary, read_summary
from gpuyard.recipes.batch.plan import read_record
from tests.executables import write_executable
from tests.fakes.queue_command import run
from tests.integration.queue_fixture import QueueUnderTest, until

SIM_VIEW = Path(__file__).parents[1] / "fakes" / "sim_view.py"
CPUS = max(2, os.cpu_count() or 1)
RAM_MB = 16000.0
# Nearly no smoothing: the tests check that gates close and open, not how fast.
BRISK = {"smoothing": "0.1s", "steady": "0.2s", "stagger": "0s"}
OPEN = {"max_cpu": 100, "min_free_mem_mb": 0}

_QUIET_DAEMON = """
import os, pathlib, sys
from msgspec.structs import replace
from gpuyard.model.machine_snapshot import Vendor
from gpuyard.daemon.main import run_daemon
from gpuyard.probes import local_machine as local
from gpuyard.probes.host import PsutilHost

whole, home = PsutilHost.read, b"GPUYARD_HOME=" + os.fsencode(os.environ["GPUYARD_HOME"])

def measure(process):
    try:
        if process.name == str(os.getpid()) or home not in (process / "environ").read_bytes().split(b"\\0"):
            return 0, 0.0
        wants_cpu = (process / "stat").read_text().rpartition(")")[2].split()[0] == "R"
        return wants_cpu, int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1048576
    except OSError:
        return 0, 0.0

def read(self):
    busy, held_mb = map(sum, zip(*map(measure, pathlib.Path("/proc").glob("[1-9]*"))))
    figures = {
        "cpu_percent": min(100.0, 100.0 * busy / max(2, os.cpu_count())),
        "memory_total_mb": RAM_MB,
        "memory_available_mb": RAM_MB - held_mb,
    }
    return replace(whole(self), **{**figures, **dict.fromkeys(sys.argv[1:])})

PsutilHost.read = read
if "GPUYARD_SIMULATE" not in os.environ:
    smi = local._ToolProbe(Vendor.NVIDIA, "nvidia-smi", "nvidia.nvidia_smi:NvidiaSmi")
    local.local_probes = lambda: {Vendor.NVIDIA: [smi]}
run_daemon()
"""


def quiet_daemon(*hidden: str) -> tuple[str, ...]:
    """Return the command of a daemon that cannot read the `hidden` figures of the host. If no GPU is simulated, it
    reads only the `nvidia-smi` on PATH."""
    return (sys.executable, "-c", _QUIET_DAEMON.replace("RAM_MB", str(RAM_MB)), *hidden)


QUIET_DAEMON = quiet_daemon()
# Each takes a resource when it reads a line, and keeps it until it is killed.
GPU_HOG = """
import sys
from gpuyard.probes.simulated_devices import SimulatedDevices, SimulatedUse
with SimulatedUse(SimulatedDevices()) as usage:
    sys.stdin.readline()
    usage.set_load(sys.argv[1], float(sys.argv[2]))
    usage.allocate(sys.argv[1], float(sys.argv[3]))
    print("taken", flush=True)
    sys.stdin.read()
"""
CPU_HOG = """
import sys
sys.stdin.readline()
print("taken", flush=True)
while True:
    pass
"""


def percent_of(processes: float) -> float:
    """Return the CPU load in percent of this many processes that are always busy."""
    return 100.0 * processes / CPUS


class Entry(Struct, frozen=True, kw_only=True):
    """A line of the simulator's journal."""

    what: str
    seed: int
    at: float
    pid: int
    device: str


class Hog:
    """A foreign process that takes its resource on `take`."""

    def __init__(self, code: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def take(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "taken\n"

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


class Batch:
    """A batch of the stand-in simulator, in folders of the test."""

    def __init__(self, queue: QueueUnderTest, folder: Path) -> None:
        self.queue = queue
        self.root, self.pruned = folder / "out", folder / "out-pruned"
        self.journal, self.sample_log = folder / "journal", folder / "samples.jsonl"
        self.gate = folder / "gate"

    def command(self, count: int, simulator: Sequence[str] = (), **options: object) -> list[str]:
        """Return the command line. Underscores in option names become dashes, and `True` is a flag."""
        roots = {"output_root": self.root, "prune_output_root": self.pruned, "sample_log": self.sample_log}
        arguments = ["datagen", "--count", str(count)]
        for name, value in {**BRISK, **OPEN, **roots, **options}.items():
            arguments.append(f"--{name.replace('_', '-')}")
            arguments += [] if value is True else [str(value)]
        return [*arguments, "--", "--journal", str(self.journal), *simulator]

    def begin(self, count: int, simulator: Sequence[str] = (), **options: object) -> None:
        """Start the batch detached."""
        done = run(*self.command(count, simulator, detach=True, **options))
        assert done.returncode == 0, done.stderr

    @property
    def first(self) -> int:
        record = read_record(self.root)
        assert record is not None
        assert record.parts[-1].first is not None
        return record.parts[-1].first

    def standing(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.queue.get(f"/batches/{self.first}")
        return answer

    def gated(self, first: int = 0) -> list[str]:
        """Return the simulator's options: runs from this seed on wait for `let_go`."""
        return ["--gate", str(self.gate), "--gated-from", str(first)]

    def let_go(self) -> None:
        self.gate.touch()

    def until_begun(self, runs: int) -> None:
        until(lambda: len(self.entries("begins")) >= runs, f"the beginning of {runs} runs")

    def until_held_by(self, gate: str) -> None:
        until(lambda: self.standing()["gate"] == gate, f"a launch held back by {gate}")

    def finished(self) -> Summary:
        """Wait for the end of all jobs, including the summary, and return the summary."""
        self.queue.wait()
        summary = read_summary(self.root)
        assert summary is not None
        return summary

    # Results

    def entries(self, *what: str) -> list[Entry]:
        found = []
        for line in self.journal.read_text().splitlines() if self.journal.exists() else []:
            event, seed, at, pid, device = line.split()
            found.append(Entry(what=event, seed=int(seed), at=float(at), pid=int(pid), device=device))
        return [entry for entry in found if not what or entry.what in what]

    def most_at_once(self, device: str | None = None) -> int:
        most = now = 0
        for entry in self.entries("begins", "fails", "ends"):
            if device is None or entry.device == device:
                now += 1 if entry.what == "begins" else -1
                most = max(most, now)
        return most

    def rows(self, event: str) -> list[dict[str, Any]]:
        rows = map(json.loads, self.sample_log.read_text().splitlines() if self.sample_log.exists() else [])
        return [row for row in rows if row["event"] == event]

    def sample_count(self) -> int:
        """Return the number of logged samples that led to no launch."""
        return len({row["taken_at"] for row in self.rows("sample")})


@pytest.fixture(name="sim_view")
def put_sim_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stand-in simulator on PATH."""
    program = tmp_path / "bin" / "sim_view"
    program.parent.mkdir()
    write_executable(program, f'#!/bin/sh\nexec {sys.executable} {SIM_VIEW} "$@"\n')
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture(name="batch")
def make_batch(own_queue: QueueUnderTest, sim_view: None, unmeasured: None, tmp_path: Path) -> Batch:
    """A batch that is not started, nor is its daemon."""
    return Batch(own_queue, tmp_path)


@pytest.fixture(name="hog")
def make_hogs(own_home: Path, request: pytest.FixtureRequest) -> Callable[..., Hog]:
    def make(code: str, *arguments: object) -> Hog:
        made = Hog(code, *map(str, arguments))
        request.addfinalizer(made.end)
        return made

    return make
