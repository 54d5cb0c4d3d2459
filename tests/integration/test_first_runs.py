"""Jobs without an estimate share a GPU from their start, and are charged what they show."""

import shlex
from pathlib import Path

import pytest

from tests.fakes import gated_job
from tests.fakes.queue_command import GPUYARD, run
from tests.integration.queue_fixture import QueueUnderTest, until

SIM_JOB = shlex.join([*GPUYARD, "sim-job"])
GB = 1024.0


def start(queue: QueueUnderTest, devices: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("GPUYARD_SIMULATE", devices)
    monkeypatch.chdir(folder)
    queue.start()


def submit(*command: str) -> int:
    return int(run("submit", "--", *command).stdout)


def reserved_mb(queue: QueueUnderTest, job_id: int) -> float:
    return float(queue.job(job_id)["attempts"][-1]["reserved_mb"])


def test_first_runs_share_a_gpu_before_they_have_used_any_memory(
    own_queue: QueueUnderTest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start(own_queue, "1x80GB", monkeypatch, tmp_path)
    importing = "until [ -e gate ]; do sleep 0.05; done"
    jobs = [submit("sh", "-c", f"{importing}; {SIM_JOB} --vram {size}G --seconds 1") for size in (1, 2, 3, 4)]
    for job in jobs:
        own_queue.until_state(job, "running")
    (tmp_path / "gate").touch()
    own_queue.wait()
    assert [own_queue.state(job) for job in jobs] == ["succeeded"] * 4


def test_the_lease_of_a_first_run_follows_what_it_shows_until_the_next_fits(
    own_queue: QueueUnderTest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before, it held the whole GPU for a minute. Each first run is followed by the next once it has been flat."""
    start(own_queue, "1x24GB", monkeypatch, tmp_path)
    jobs = [submit(*gated_job.COMMAND, "--vram", str(size * GB), "gate") for size in (2, 3, 4)]
    for job in jobs:
        own_queue.until_state(job, "running")
    until(lambda: reserved_mb(own_queue, jobs[0]) < 3 * GB, "a lease that is close to what the first job holds")
    assert reserved_mb(own_queue, jobs[0]) >= 2 * GB
    assert "until it has shown what it needs (no estimate yet)" in run("show", str(jobs[0])).stdout
    (tmp_path / "gate").touch()
    own_queue.wait()
    assert [own_queue.job(job)["attempts"][-1]["outcome"] for job in jobs] == ["succeeded"] * 3
    learned = {one["kind"]: one["measured_runs"] for one in own_queue.get("/estimates")["estimates"]}
    assert learned["machine"] == 3
