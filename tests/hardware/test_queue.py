"""On a machine with an NVIDIA card and PyTorch: the queue with real jobs, compared with `nvidia-smi`."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hardware.test_leases import pids_by_smi
from tests.integration.queue_fixture import DEADLINE_S, until

pytestmark = pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no NVIDIA card")

# Allocates the given GB on its GPU, computes with them, and runs until the file exists.
WORK = """
import os, sys, time
import torch
gigabytes, sign = float(sys.argv[1]), sys.argv[2]
block = torch.ones(int(gigabytes * 1024), 1024, 256, device="cuda")
torch.cuda.synchronize()
print("ready", os.getpid(), torch.cuda.get_device_properties(0).uuid, flush=True)
while not os.path.exists(sign):
    block.mul_(1.0)
    torch.cuda.synchronize()
    time.sleep(0.05)
"""


def gpuyard(*arguments: str) -> str:
    command = [sys.executable, "-m", "gpuyard", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def shown(*arguments: str) -> Any:
    return json.loads(gpuyard(*arguments, "--json"))


@pytest.fixture(autouse=True)
def queue(own_home: Path) -> Any:
    pytest.importorskip("torch")
    yield own_home
    subprocess.run([sys.executable, "-m", "gpuyard", "cancel", "all"], timeout=120, check=False)
    subprocess.run([sys.executable, "-m", "gpuyard", "wait"], timeout=120, check=False)
    gpuyard("daemon", "stop")


def submit(tmp_path: Path, gigabytes: float, *options: str, sign: str = "go") -> int:
    command = [sys.executable, "-c", WORK, str(gigabytes), str(tmp_path / sign)]
    return int(gpuyard("submit", *options, "--", *command))


def is_ready(job_id: int) -> bool:
    log = shown("show", str(job_id))["log"]
    return log is not None and "ready" in Path(log).read_text()


def test_twenty_jobs_share_the_card_by_priority_and_a_running_one_is_cancelled(tmp_path: Path) -> None:
    total_gb = float(shown("devices")["devices"][0]["memory_total_mb"]) / 1024
    size = f"{total_gb / 7:.1f}G"  # so that six run at once
    gpuyard("pause")
    jobs = [submit(tmp_path, 2, "--vram", size, "--priority", str(n % 3)) for n in range(20)]
    gpuyard("unpause")
    until(lambda: len(shown("queue", "--state", "running")["jobs"]) == 6, "six running jobs")
    running = [job["id"] for job in shown("queue", "--state", "running")["jobs"]]
    assert {job["priority"] for job in shown("queue", "--state", "running")["jobs"]} == {2}, (
        "the highest priority first"
    )
    for job_id in running:
        until(lambda job_id=job_id: is_ready(job_id), f"job {job_id} at work")  # type: ignore[misc]
    held = {pid: memory for pid, (_, memory) in pids_by_smi().items()}
    victim = running[0]
    pid = int(gpuyard("logs", str(victim)).split()[1])
    assert held[pid] > 2048
    lease = next(lease for lease in shown("leases")["leases"] if lease["label"] == f"job {victim}")
    assert abs(lease["shares"][0]["measured_mb"] - held[pid]) < 64
    gpuyard("cancel", str(victim))
    until(lambda: shown("show", str(victim))["state"] == "cancelled", "the end of the cancelled job")
    assert pid not in pids_by_smi()
    until(lambda: len(shown("queue", "--state", "running")["jobs"]) == 6, "another running job in its place")
    (tmp_path / "go").touch()
    wait = [sys.executable, "-m", "gpuyard", "wait", *map(str, jobs)]
    status = subprocess.run(wait, timeout=300, check=False).returncode
    assert status == 6, "one job was cancelled and none failed"
    states = [shown("show", str(job_id))["state"] for job_id in jobs]
    assert sorted(set(states)) == ["cancelled", "succeeded"]
    assert states.count("cancelled") == 1
    assert shown("leases")["leases"] == []


def test_an_exclusive_job_starts_at_once_on_a_card_that_was_just_busy(tmp_path: Path) -> None:
    first = submit(tmp_path, 4, "--exclusive", sign="first")
    second = submit(tmp_path, 4, "--exclusive", sign="second")
    until(lambda: is_ready(first), "the first job's memory")
    assert shown("show", str(second))["state"] == "queued"
    assert f"job {first}" in gpuyard("why", str(second))
    (tmp_path / "first").touch()
    until(lambda: is_ready(second), "the second job's memory")
    (tmp_path / "second").touch()
    assert (
        subprocess.run([sys.executable, "-m", "gpuyard", "wait"], timeout=DEADLINE_S * 4, check=False).returncode == 0
    )
