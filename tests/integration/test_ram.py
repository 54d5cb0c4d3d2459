"""RAM of jobs: real processes, found by their sessions and environment variables."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuyard.engines.local.attempt_processes import RamMeter

HOLD = "import sys, time; kept = bytearray(int(sys.argv[1]) << 20); print('ready', flush=True); sys.stdin.read()"


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def hold(started: list[subprocess.Popen[str]], megabytes: int, queue: Path, job: int = 7) -> None:
    marks = {"GPUYARD_QUEUE": str(queue), "GPUYARD_JOB_ID": str(job), "GPUYARD_ATTEMPT": "1"}
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", HOLD, str(megabytes)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **marks}, start_new_session=True,
    )  # fmt: skip
    started.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def test_all_processes_of_an_attempt_count(started: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    hold(started, 40, tmp_path)
    hold(started, 60, tmp_path)  # a second process of the attempt, in a session of its own
    hold(started, 30, tmp_path, job=8)
    found = RamMeter(str(tmp_path)).measure()
    assert found.keys() == {(7, 1), (8, 1)}
    assert 100 < found[7, 1] < 170
    assert 30 < found[8, 1] < 80


def test_cpu_time_of_an_attempt_is_measured_with_its_ram(
    started: list["subprocess.Popen[str]"], tmp_path: Path
) -> None:
    hold(started, 60, tmp_path)
    meter = RamMeter(str(tmp_path))
    assert meter.cpu_s() == {}
    meter.measure()
    assert meter.cpu_s().keys() == {(7, 1)}
    assert 0.0 <= meter.cpu_s()[7, 1] < 60.0


def test_jobs_of_another_queue_do_not_count(started: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    hold(started, 10, tmp_path / "other")
    assert RamMeter(str(tmp_path)).measure() == {}
