"""A GPU whose driver lists no processes: work starts beside a desktop, and what it needs is learned by what the use of
the card grows by."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.queue_command import run
from tests.integration.queue_fixture import QueueUnderTest, until

TOTAL_MB, DESKTOP_MB = 16384, 1843
# Each file in the folder is a program's, and says how many MB it holds.
RADEONTOP = f"""
import pathlib
used = {DESKTOP_MB} + sum(int(file.read_text() or 0) for file in pathlib.Path({{folder!r}}).iterdir())
print(f"1794780887.1: bus 03, gpu 7.00%, vram {{{{100 * used / {TOTAL_MB}:.2f}}}}% {{{{used}}}}.00mb")
"""
# It holds so much until there is a file that has its id as its name.
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


def test_what_the_use_of_the_card_grows_by_is_what_it_needs(queue: QueueUnderTest, tmp_path: Path) -> None:
    words = (sys.executable, "-c", HOLD, str(tmp_path / "held"), "3000", str(tmp_path))
    first = queue.submit(*words)
    until(lambda: peaks_of(queue, first) == [3000.0], "its memory, without the desktop's")
    second = queue.submit(*words)
    assert "GB needed" in queue.why(second), "nobody joins it until it is known what it needs"
    (tmp_path / str(first)).touch()
    queue.wait(first)
    third = queue.submit(*words)
    until(lambda: queue.state(second) == queue.state(third) == "running", "two at once, since both fit")
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
