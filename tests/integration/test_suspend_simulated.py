"""Suspending real processes that use simulated devices: freed memory, resumed work, locks."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from gpuyard.engines.local.engine import LocalEngine
from gpuyard.engines.suspend.suspender import LocalSuspender
from gpuyard.model.job import Attempt
from gpuyard.probes.simulated_devices import SimulatedDevices
from tests.integration.engine_fixture import outcomes
from tests.integration.suspend_fixture import (
    begun,
    nothing_is_left,
    resumed,
    script,
    suspended,
    suspender,
    wait_for_line,
)

__all__ = ["nothing_is_left", "suspender"]

pytestmark = pytest.mark.usefixtures("unmeasured")

GPUYARD = (sys.executable, "-m", "gpuyard")
# A job that works until it is ended.
ENDLESS = ("--work", "1000000")
DEVICES = ("SIM-0",)
# Uses its device without a pause, and so holds the lock of the simulated shares most of the time.
RESTLESS = """
from gpuyard.probes.simulated_devices import SimulatedUse
usage = SimulatedUse()
usage.allocate("SIM-0", 1024)
print("holding", flush=True)
while True:
    usage.work()
"""
# Acquires and releases the mutex of a ledger without a pause.
LEDGER = """
import fcntl, os, sys
print("holding", flush=True)
while True:
    folder = os.open(sys.argv[1], os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    os.getpid()
    os.close(folder)
"""

# Suspends an attempt and prints whether that succeeded.
DAEMON = """
import select, sys
from pathlib import Path
import msgspec
from gpuyard.model.job import Attempt
from gpuyard.engines.suspend.suspender import LocalSuspender
suspender = LocalSuspender(Path(sys.argv[1]) / "suspending", sys.argv[1])
suspender.suspend(msgspec.json.decode(sys.argv[2], type=Attempt))
while not (news := suspender.moved()):
    select.select([suspender.fileno()], [], [])
print(news[0].is_done)
"""


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevices:
    monkeypatch.setenv("GPUYARD_SIMULATE", "1x24GB")
    return SimulatedDevices()


def used_mb(devices: SimulatedDevices) -> float | None:
    return devices.read(1).devices[0].memory_used_mb


def sim_job(engine: LocalEngine, folder: Path, job_id: int, *options: str) -> Attempt:
    return holding(engine, folder, job_id, *GPUYARD, "sim-job", *options)


def holding(engine: LocalEngine, folder: Path, job_id: int, *command: str) -> Attempt:
    attempt = begun(engine, job_id, *command, devices=DEVICES)
    wait_for_line(folder, job_id, "holding")
    return attempt


def test_a_killed_suspended_job_leaves_no_memory_in_use(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, devices: SimulatedDevices
) -> None:
    attempt = sim_job(engine, folder, 1, "--vram", "20G", *ENDLESS)
    assert suspended(suspender, attempt).is_done
    engine.signal(attempt, signal.SIGKILL)
    outcomes(engine)
    assert used_mb(devices) == 0
    assert not list(devices.folder.glob("*.share"))


@pytest.mark.full
def test_no_process_is_stopped_while_it_holds_the_lock_of_the_shares(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, devices: SimulatedDevices
) -> None:
    attempt = script(engine, 1, RESTLESS, devices=DEVICES)
    wait_for_line(folder, 1, "holding")
    for _ in range(10):
        assert suspended(suspender, attempt).is_done
        assert used_mb(devices) == 0, "reading the shares did not block"
        assert resumed(suspender, attempt, 1024).is_done
        assert used_mb(devices) == 1024


def test_no_process_is_stopped_while_it_holds_the_mutex_of_a_ledger(engine: LocalEngine, folder: Path) -> None:
    ledger = folder / "ledger"
    ledger.mkdir()
    careful = LocalSuspender(folder / "suspending", str(folder), mutexes=[ledger])
    attempt = script(engine, 1, LEDGER, str(ledger), devices=DEVICES)
    wait_for_line(folder, 1, "holding")
    for _ in range(10):
        assert suspended(careful, attempt).is_done
        descriptor = os.open(ledger, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)
        assert resumed(careful, attempt, 0).is_done
    careful.close()


def test_a_mutex_held_by_a_foreign_process_prevents_suspending(
    engine: LocalEngine, folder: Path, devices: SimulatedDevices
) -> None:
    ledger = folder / "ledger"
    ledger.mkdir()
    careful = LocalSuspender(folder / "suspending", str(folder), mutexes=[ledger])
    attempt = sim_job(engine, folder, 1, "--vram", "2G", *ENDLESS)
    descriptor = os.open(ledger, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    moved = suspended(careful, attempt)
    os.close(descriptor)
    assert (moved.is_done, moved.is_ruined) == (False, False)
    assert moved.text.startswith("another process held ")
    assert used_mb(devices) == 2048
    assert suspended(careful, attempt).is_done
    careful.close()


def test_a_daemon_started_by_a_job_is_not_stopped_with_it(engine: LocalEngine, folder: Path) -> None:
    """Such a daemon has the job's variables in its environment, and would stop itself."""
    attempt = sim_job(engine, folder, 1, "--vram", "2G", *ENDLESS)
    marks = {"GPUYARD_QUEUE": str(folder), "GPUYARD_JOB_ID": "1", "GPUYARD_ATTEMPT": "1"}
    arguments = (str(folder), msgspec.json.encode(attempt).decode())
    done = subprocess.run(
        [sys.executable, "-c", DAEMON, *arguments], env={**os.environ, **marks}, capture_output=True, text=True,
        timeout=90, check=True,
    )  # fmt: skip
    assert done.stdout == "True\n"
