"""A suspender over the test's engine, and how to wait for its results."""

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from gpuyard.engines.local import attempt_processes as process_tree
from gpuyard.engines.local.engine import LocalEngine
from gpuyard.engines.suspend.suspender import LocalSuspender
from gpuyard.model.job import Attempt
from gpuyard.ports import SuspendResult
from tests.integration.engine_fixture import DEADLINE_S, attempt_of, launch_of, log_of, wait_for

_begun: list[Attempt] = []


@pytest.fixture(autouse=True)
def nothing_is_left(folder: Path) -> Iterator[None]:
    """End the programs and helpers of a test, however it ends."""
    _begun.clear()
    yield
    for attempt in _begun:
        process_tree.signal_each([attempt], str(folder), signal.SIGKILL)
    for pid in _helpers():
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


@pytest.fixture
def suspender(folder: Path) -> Iterator[LocalSuspender]:
    suspender = LocalSuspender(folder / "suspending", str(folder))
    yield suspender
    suspender.close()


def begun(engine: LocalEngine, job_id: int, *command: str, devices: tuple[str, ...]) -> Attempt:
    """Start an attempt with the GPUYARD_, FAKE_ and LD_ variables of the test."""
    environment = {name: value for name, value in os.environ.items() if name.startswith(("GPUYARD_", "FAKE_", "LD_"))}
    prepared = engine.prepare(launch_of(job_id, *command, environment=environment), None)
    engine.start_prepared()
    _begun.append(msgspec.structs.replace(attempt_of(prepared), devices=devices))
    return _begun[-1]


def script(engine: LocalEngine, job_id: int, program: str, *arguments: str, devices: tuple[str, ...]) -> Attempt:
    return begun(engine, job_id, sys.executable, "-c", program, *arguments, devices=devices)


def wait_for_line(folder: Path, job_id: int, line: str) -> None:
    def is_there() -> bool:
        return (folder / "logs" / f"{job_id}.1.log").exists() and line in log_of(folder, job_id)

    wait_for(is_there, f"'{line}' in the log of job {job_id}")


def next_result(suspender: LocalSuspender) -> SuspendResult:
    """Wait for the next result and return it; there must be only one."""
    deadline = time.monotonic() + DEADLINE_S
    while not (results := suspender.moved()):
        assert time.monotonic() < deadline, "no result"
        select.select([suspender.fileno()], [], [], 0.5)
    (one,) = results
    return one


def suspended(suspender: LocalSuspender, attempt: Attempt) -> SuspendResult:
    suspender.suspend(attempt)
    return next_result(suspender)


def resumed(suspender: LocalSuspender, attempt: Attempt, needs_mb: float) -> SuspendResult:
    """Resume with `needs_mb` on each device, and return the result."""
    suspender.resume(attempt, dict.fromkeys(attempt.devices, needs_mb))
    return next_result(suspender)


def helper_pid() -> int:
    """Wait until only one helper is left, and return its pid."""
    wait_for(lambda: len(_helpers()) == 1, "a single helper")
    (pid,) = _helpers()
    return pid


def _helpers() -> list[int]:
    found = []
    for one in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # just ended
            if "gpuyard.engines.suspend.helper_program" in one.cmdline():
                found.append(one.pid)
    return found


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
