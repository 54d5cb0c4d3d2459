"""A GPU whose driver lists no processes: jobs start beside a desktop, and their memory is estimated from the growth of
the device's memory use."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.queue_command import run
from tests.integration.queue_fixture import QueueUnderTest, until

TOTAL_MB, DESKTOP_MB = 16384, 1843
# Each file in the folder belongs to a program and contains the MB that it holds.
RADEONTOP = f"""
import pathlib
used = {DESKTOP_MB} + sum(int(file.read_text() or 0) for file in pathlib.Path({{folder!r}}).iterdir())
print(f"1794780887.1: bus 03, gpu 7.00%, vram {{{{100 * used / {TOTAL_MB}:.2f}}}}% {{{{used}}}}.00mb")
"""
# Holds the given MB until a file named by its job id exists.
HOLD = """
import os, pathlib, sys, time
file = pathlib.Path(sys.argv[1], os.environ["GPUYARD_JOB_ID"])
file.write_text(sys.argv[2])
while not pathlib.Path(sys.argv[3], os.environ["GPUYARD_JOB_ID"]).exists():
    time.sleep(0.02)
file.unlink()
"""


@pytest.fixture
def queue(
    own_queue: QueueUnderTest, tmp_path: Path, tools: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> QueueUnderTest:
    (tmp_path / "held").mkdir()
    tools("radeontop", RADEONTOP.format(folder=str(tmp_path / "held")))
    monkeypatch.delenv("GPUYARD_SIMULATE")
    own_queue.start()
    return own_queue


def test_a_first_run_starts_beside_a_desktop(queue: QueueUnderTest) -> None:
    job_id = queue.submit("echo", "hi")
    queue.wait()
    assert (queue.state(job_id), queue.log_of(job_id)) == ("succeeded", "hi\n")
    assert run("run", "--", "echo", "alone").stdout == "alone\n"


def test_a_batch_starts_beside_a_desktop(queue: QueueUnderTest, tmp_path: Path) -> None:
    bounds = ("--max-cpu", "100", "--min-free-mem-mb", "0", "--max-gpu", "80", "--max-gpu-mem-mb", "12000")
    done = run("batch", "--count", "2", *bounds, "--output-root", str(tmp_path / "out"), "--", "true")
    assert "all 2 runs succeeded" in done.stdout, done.stderr


def test_the_growth_of_memory_use_is_the_estimate_of_a_job(queue: QueueUnderTest, tmp_path: Path) -> None:
    command = (sys.executable, "-c", HOLD, str(tmp_path / "held"), "3000", str(tmp_path))
    first = queue.submit(*command)
    until(lambda: peaks_of(queue, first) == [3000.0], "its memory, without the desktop's")
    second = queue.submit(*command)
    assert "held by" in queue.why(second), "no other job shares the card until the estimate exists"
    (tmp_path / str(first)).touch()
    queue.wait(first)
    third = queue.submit(*command)
    until(lambda: queue.state(second) == queue.state(third) == "running", "two jobs at once, since both fit")
    reserved_mb = queue.job(third)["reserved_mb"]
    assert 3000 < reserved_mb < 4000
    large = queue.submit("true", vram="12G")
    free_mb = TOTAL_MB - DESKTOP_MB - 2 * reserved_mb
    assert f"{free_mb / 1024:.1f} GB free" in queue.why(large)
    for each in (second, third):
        (tmp_path / str(each)).touch()
    queue.wait()
    assert queue.counts() == {"succeeded": 4}


def peaks_of(queue: QueueUnderTest, job_id: int) -> list[float]:
    attempts = queue.job(job_id)["attempts"]
    return [peak for attempt in attempts for peak in attempt["peaks_mb"].values()]
