"""How much of its rate a queue keeps beside ten scripts that lease and release GPUs, and two busy loops.

Each tool runs the same jobs alone and then beside the same scripts and loops. Those beside gpuyard use its ledger;
those beside another tool use a ledger of their own. There are two settings: GPUs enough for all, so that no script
waits for one, and so few that most scripts always wait, each with a ticket in the ledger. There, jobs with a lease
compete with the scripts for GPUs, and the slots of other tools do not.
"""

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from bench.peers import peers
from bench.private_gpuyard import private_gpuyard
from bench.work import Tool, ToolFailed, Work, do_work

_ROUNDS, _SLOTS = 3, 2
_SCRIPTS, _LOOPS = 10, 2
# The number of GPUs, and of jobs: where these have to wait for GPUs as well, fewer are done within the time limit.
_SETTINGS = {
    "GPUs for all scripts and jobs": (_SCRIPTS + _SLOTS, 1000),
    "fewer GPUs than scripts, which wait": (4, 200),
}
# Prints a line when it has leased for the first time, and at its end how often it leased in a second.
_SCRIPT = """
import signal, sys, time
from gpuyard import GPUScheduler
leased, started = 0, time.monotonic()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print(leased / (time.monotonic() - started))))
while True:
    with GPUScheduler(quiet=True):
        time.sleep(0.01)
    leased += 1
    if leased == 1:
        print("ready", flush=True)
    time.sleep(0.01)
"""


class _Rates(msgspec.Struct):
    alone: list[float] = msgspec.field(default_factory=list)
    beside: list[float] = msgspec.field(default_factory=list)
    leases: list[float] = msgspec.field(default_factory=list)


def bench_contention() -> None:
    # Folders stay until the end: ext4 creates files slowly for minutes after many were removed.
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        for number, (setting, (gpus, jobs)) in enumerate(_SETTINGS.items()):
            folder = Path(scratch) / str(number)
            folder.mkdir()
            _bench_setting(folder, setting, gpus, jobs)


def _bench_setting(folder: Path, setting: str, gpus: int, jobs: int) -> None:
    devices = f"{gpus}x24GB"
    tools = [*_own_tools(devices), *(tool for tool in peers() if tool.name.startswith("task-spooler"))]
    rates = {tool.name: _Rates() for tool in tools if tool.is_installed()}
    for number in range(_ROUNDS):
        for place, tool in enumerate(tools):
            if tool.name in rates:
                _measure(tool, folder / f"{number}-{place}", devices, jobs, rates[tool.name])
    print(f"{setting}: {gpus} GPUs, {jobs:,} jobs")
    print(f"`true` through {_SLOTS} slots, median of {_ROUNDS}; beside: {_SCRIPTS} scripts and {_LOOPS} busy loops")
    print(f"{'':<34}{'alone':>11}{'beside':>11}{'kept':>8}{'their leases':>15}")
    for name, each in rates.items():
        alone, beside, leases = (statistics.median(values) for values in (each.alone, each.beside, each.leases))
        print(f"{name:<34}{alone:8,.0f} /s{beside:8,.0f} /s{beside / alone:8.1%}{leases:12,.0f} /s")
    print(flush=True)


def _own_tools(devices: str) -> list[Tool]:
    options = {"gpuyard, with a lease each": [], "gpuyard, without a GPU": ["--gpus", "0"]}
    return [Tool(name=name, run=partial(_run_gpuyard, devices, each), is_own=True) for name, each in options.items()]


def _run_gpuyard(devices: str, options: Sequence[str], work: Work) -> float:
    with private_gpuyard(_home(work.folder), devices) as gpuyard:
        started = time.perf_counter()
        gpuyard("submit", *options, "--array", f"0-{work.count - 1}%{work.slots}", "--", *work.command)
        gpuyard("wait")
        return time.perf_counter() - started


def _home(folder: Path) -> Path:
    """Return the home of gpuyard and of the scripts beside the work in `folder`."""
    return folder.with_name(f"home-{folder.name}")


def _measure(tool: Tool, folder: Path, devices: str, jobs: int, rates: _Rates) -> None:
    command = (shutil.which("true") or "true",)
    rates.alone.append(jobs / do_work(tool, folder.with_name(f"{folder.name}-alone"), command, jobs, _SLOTS))
    with _others(folder, devices) as leases:
        seconds = do_work(tool, folder, command, jobs, _SLOTS)
    rates.beside.append(jobs / seconds)
    rates.leases.append(sum(leases))


@contextlib.contextmanager
def _others(folder: Path, devices: str) -> Iterator[list[float]]:
    """Run the scripts and the busy loops. The list gets the rates of the scripts after the block."""
    env = {**os.environ, "GPUYARD_HOME": str(_home(folder)), "GPUYARD_SIMULATE": devices}
    with contextlib.ExitStack() as processes:
        scripts = [processes.enter_context(_process(_SCRIPT, env)) for _ in range(_SCRIPTS)]
        for script in scripts:
            if not _line(script):
                raise ToolFailed("a script beside the queue could not lease a GPU")
        for _ in range(_LOOPS):
            processes.enter_context(_process("while True: pass", env))
        rates: list[float] = []
        yield rates
        for script in scripts:
            script.terminate()
        rates += [float(_line(script)) for script in scripts]


@contextlib.contextmanager
def _process(program: str, env: Mapping[str, str]) -> "Iterator[subprocess.Popen[str]]":
    with subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()
