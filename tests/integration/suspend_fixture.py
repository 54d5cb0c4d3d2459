"""A suspender of the test's own over the test's engine, and how to wait for what it tells."""

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

from gpuyard.core.job.job import Attempt
from gpuyard.engines.local import process_tree
from gpuyard.engines.local.engine import LocalEngine
from gpuyard.engines.suspend.suspender import LocalSuspender
from gpuyard.ports import SuspendResult
from tests.integration.engine_fixture import DEADLINE_S, attempt_of, launch_of, log_of, wait_for

_begun: list[Attempt] = []


@pytest.fixture(autouse=True)
def nothing_is_left(folder: Path) -> Iterator[None]:
    """However a test ends, its programs and helpers do."""
    _begun.clear()
    yield
    for attempt in _begun:
        process_tree.signal_all(attempt, str(folder), signal.SIGKILL)
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
    """An attempt that sees what the test's own environment names."""
    environment = {name: value for name, value in os.environ.items() if name.startswith(("GPUYARD_", "FAKE_", "LD_"))}
    prepared = engine.prepare(launch_of(job_id, *command, environment=environment), None)
    engine.start_prepared()
    _begun.append(msgspec.structs.replace(attempt_of(prepared), devices=devices))
    return _begun[-1]


def script(engine: LocalEngine, job_id: int, program: str, *words: str, devices: tuple[str, ...]) -> Attempt:
    return begun(engine, job_id, sys.executable, "-c", program, *words, devices=devices)


def wait_for_line(folder: Path, job_id: int, line: str) -> None:
    def is_there() -> bool:
        return (folder / "logs" / f"{job_id}.1.log").exists() and line in log_of(folder, job_id)

    wait_for(is_there, f"'{line}' in the log of job {job_id}")


def next_result(suspender: LocalSuspender) -> SuspendResult:
    """The next that comes out; there must be no other with it."""
    deadline = time.monotonic() + DEADLINE_S
    while not (news := suspender.moved()):
        assert time.monotonic() < deadline, "nothing came out"
        select.select([suspender.fileno()], [], [], 0.5)
    (one,) = news
    return one


def suspended(suspender: LocalSuspender, attempt: Attempt) -> SuspendResult:
    suspender.suspend(attempt)
    return next_result(suspender)


def resumed(suspender: LocalSuspender, attempt: Attempt, needs_mb: float) -> SuspendResult:
    """With so much needed on each of its devices."""
    suspender.resume(attempt, dict.fromkeys(attempt.devices, needs_mb))
    return next_result(suspender)


def helper_pid() -> int:
    """Of the one helper at work, once those before it have come to their end."""
    wait_for(lambda: len(_helpers()) == 1, "a single helper")
    (pid,) = _helpers()
    return pid


def _helpers() -> list[int]:
    found = []
    for one in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            if "gpuyard.engines.suspend.helper_process" in one.cmdline():
                found.append(one.pid)
    return found


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
