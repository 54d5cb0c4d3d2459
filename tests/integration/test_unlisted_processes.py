"""A GPU whose driver lists no processes: jobs start beside a desktop, and their memory is estimated from the growth of
the device's memory use. A busy one is waited for."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuyard import GPUScheduler
from gpuyard.errors import WaitedTooLong
from tests.fakes.queue_command import run
from tests.integration.queue_fixture import QueueUnderTest, until
from tests.integration.workspace_fixture import Workspaces

TOTAL_MB, DESKTOP_MB = 16384, 1843
# Each file in the folder belongs to a program and contains the MB that it holds.
RADEONTOP = f"""
import pathlib
used = {DESKTOP_MB} + sum(int(file.read_text() or 0) for file in pathlib.Path({{folder!r}}).iterdir())
print(f"1794780887.1: bus 03, gpu 7.00%, vram {{{{100 * used / {TOTAL_MB}:.2f}}}}% {{{{used}}}}.00mb")
"""
# Prints one card; a file says how much of its memory is used, in MB, and how busy it is.
NVIDIA_SMI = """
import pathlib
used, percent = pathlib.Path({card!r}).read_text().split()
print(f'''<nvidia_smi_log>
  <gpu id="00000000:3B:00.0"><product_name>NVIDIA Test</product_name>
    <uuid>GPU-11111111-0000-0000-0000-000000000001</uuid>
    <fb_memory_usage><total>24576 MiB</total><used>{{used}} MiB</used><free>{{24576 - int(used)}} MiB</free>
    </fb_memory_usage><utilization><gpu_util>{{percent}} %</gpu_util></utilization>
    <processes>{listed}</processes></gpu></nvidia_smi_log>''')
"""
BUSY = "processes outside gpuyard keep it 97% busy without a lease; the limit is 50%"
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


@pytest.fixture(params=["", "N/A"], ids=["empty list", "no list"])
def card(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    tools: Callable[[str, str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """Return the file that says how the card is used; a program in another container works on it."""
    file = tmp_path / "card"
    file.write_text("9000 97")
    tools("nvidia-smi", NVIDIA_SMI.format(card=str(file), listed=request.param))
    monkeypatch.delenv("GPUYARD_SIMULATE", raising=False)
    return file


def test_no_job_starts_beside_a_busy_program_that_is_not_listed(
    own_queue: QueueUnderTest, card: Path, tmp_path: Path
) -> None:
    own_queue.start()
    options: list[dict[str, object]] = [{}, {"exclusive": True}, {"vram": "2G"}]
    jobs = [own_queue.submit("echo", "hi", **each) for each in options]
    bounds = ("--max-cpu", "100", "--min-free-mem-mb", "0", "--output-root", str(tmp_path / "out"))
    assert run("batch", "--count", "1", "--detach", "--gpus", "1", *bounds, "--", "true").returncode == 0
    jobs.append(jobs[-1] + 1)
    until(lambda: all(BUSY in own_queue.why(each) for each in jobs), "what they wait for")
    without_a_gpu = own_queue.submit("true", gpus=0)
    own_queue.wait(without_a_gpu)
    for arguments in ((), ("--vram", "2G")):
        refused = run("run", *arguments, "--wait", "0", "--", "echo", "started")
        assert (refused.stdout, BUSY in refused.stderr) == ("", True)
    for limits in ({"vram": "2G"}, {"memory_free_threshold_gb": 5, "utilization_threshold_percent": None}):
        with pytest.raises(WaitedTooLong, match="97% busy"), GPUScheduler(max_wait_time=0, **limits):
            pass
    assert {own_queue.state(each) for each in jobs} == {"queued"}
    card.write_text("400 2")  # the program has ended; the driver holds some memory itself
    own_queue.wait()
    assert set(own_queue.counts()) == {"succeeded"}
    assert run("run", "--vram", "2G", "--wait", "0", "--", "echo", "started").stdout == "started\n"


def test_jobs_share_a_card_that_lists_no_process_however_busy_they_keep_it(
    own_queue: QueueUnderTest, card: Path
) -> None:
    card.write_text("400 0")
    own_queue.start()
    gates = []
    for used, name in ((4400, "one"), (8400, "two"), (12400, "three")):
        gates.append(own_queue.start_gated(name, vram="4G")[1])
        card.write_text(f"{used} 99")
    for gate in gates:
        gate.write_text("go\n")
    own_queue.wait()
    assert own_queue.counts() == {"succeeded": 3}


@pytest.mark.needs("tmux")
def test_no_task_of_a_workspace_starts_beside_a_busy_program_that_is_not_listed(
    workspaces: Workspaces, card: Path
) -> None:
    workspace = workspaces.make(sessions="none")
    workspace.add("exp")
    workspace.do("start")
    until(lambda: BUSY in (workspace.tasks()["exp"]["reason"] or ""), "what it waits for")
    card.write_text("9000 2")
    assert {row["state"] for row in workspace.until_over().values()} == {"completed"}


def peaks_of(queue: QueueUnderTest, job_id: int) -> list[float]:
    attempts = queue.job(job_id)["attempts"]
    return [peak for attempt in attempts for peak in attempt["peaks_mb"].values()]
