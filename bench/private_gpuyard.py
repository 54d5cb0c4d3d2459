"""gpuyard as a user runs it: the installed command, with its own home and daemon."""

import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from bench.work import Tool, ToolFailed, Work

GPUYARD = str(Path(sys.executable).with_name("gpuyard"))
_LIMIT_S = 120.0


class PrivateGpuyard(msgspec.Struct, frozen=True):
    home: Path
    env: dict[str, str]
    command: str = GPUYARD

    def __call__(self, *arguments: str) -> str:
        """Run a command of gpuyard, and return its output. Raises ToolFailed."""
        typed = f"'gpuyard {' '.join(arguments[:2])}'"
        try:
            done = subprocess.run(
                [self.command, *arguments],
                env=self.env,
                cwd=self.home,
                capture_output=True,
                text=True,
                timeout=_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ToolFailed(f"{typed} was not done within {_LIMIT_S:.0f} s") from None
        if done.returncode != 0:
            raise ToolFailed(f"{typed} ended with {done.returncode}: {' '.join(done.stderr.split())}")
        return done.stdout

    def status(self) -> dict[str, int]:
        status: dict[str, int] = json.loads(self("daemon", "status", "--json"))
        return status

    @property
    def socket(self) -> Path:
        return self.home / "daemon.sock"


@contextlib.contextmanager
def private_gpuyard(home: Path, devices: str, command: str = GPUYARD) -> Iterator[PrivateGpuyard]:
    home.mkdir(exist_ok=True)
    # Without the user's own settings, such as a shared lease directory. Modules are compiled once, as for users.
    left_out = ("GPUYARD_", "PYTHONDONTWRITEBYTECODE")
    env = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    gpuyard = PrivateGpuyard(home, {**env, "GPUYARD_HOME": str(home), "GPUYARD_SIMULATE": devices}, command)
    gpuyard("daemon", "start")
    try:
        yield gpuyard
    finally:
        gpuyard("daemon", "stop")


def gpuyard_tools() -> list[Tool]:
    return [
        _tool("gpuyard, an array", _array),
        _tool("gpuyard, a file of commands", lambda work: ["--from", str(_file(work))]),
        _tool("gpuyard, an array of CPU jobs", _cpu_array),
    ]


def _tool(name: str, submission: Callable[[Work], list[str]]) -> Tool:
    return Tool(name=name, run=lambda work: _run(work, submission(work)), is_own=True, note="SQLite")


def _run(work: Work, submission: list[str]) -> float:
    with private_gpuyard(work.folder / "home", f"{work.slots}x24GB") as gpuyard:
        started = time.perf_counter()
        gpuyard("submit", "--wait", *submission)
        return time.perf_counter() - started


def _array(work: Work) -> list[str]:
    return ["--array", f"0-{work.count - 1}", "--", *work.command]


def _cpu_array(work: Work) -> list[str]:
    # No device limits CPU jobs, so the array limits how many run at a time.
    return ["--gpus", "0", "--array", f"0-{work.count - 1}%{work.slots}", "--", *work.command]


def _file(work: Work) -> Path:
    path = work.folder / "commands"
    path.write_text(f"{shlex.join(work.command)}\n" * work.count)
    return path
