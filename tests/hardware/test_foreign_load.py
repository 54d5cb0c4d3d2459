"""On a machine with one NVIDIA card and PyTorch: jobs wait for a foreign process that loads the card."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hardware.test_queue import gpuyard, shown
from tests.integration.queue_fixture import DEADLINE_S, until

pytestmark = pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no NVIDIA card")

MULTIPLIES = """
import torch
block = torch.ones(8192, 8192, device="cuda", dtype=torch.bfloat16)
print("busy", flush=True)
while True:
    for _ in range(20):
        block @ block
    torch.cuda.synchronize()
"""
TAKES = """
import sys, time
from gpuyard import GPUScheduler
with GPUScheduler(vram="2G", poll_interval=60):
    print(time.time(), flush=True)
"""
SAYS_WHEN = "import time; print(time.time())"
SETTINGS = "sessions: none\nlog_dir: logs\nstartup_delay: 0\ncommand_delay: 0\n"


@pytest.fixture
def foreign_process(own_home: Path) -> Iterator["subprocess.Popen[str]"]:
    """A foreign process that loads the card fully; wait until the load is measured."""
    pytest.importorskip("torch")
    with subprocess.Popen([sys.executable, "-c", MULTIPLIES], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "busy\n"
        until(lambda: shown("devices")["devices"][0]["utilization_percent"] > 90, "a busy card")
        yield process
        process.kill()
    gpuyard("wait")
    gpuyard("daemon", "stop")


def start_workspace(folder: Path) -> int:
    """Start the only task of a new workspace, and return its job."""
    gpuyard("workspace", "init", str(folder))
    (folder / "scheduler_config.yml").write_text(f"python_env: {sys.executable}\n{SETTINGS}")
    (folder / "train.py").write_text(SAYS_WHEN)
    (folder / "configs/exp.yml").write_text("seed: 1\n")
    gpuyard("workspace", "--workspace", str(folder), "start")
    [task] = json.loads(gpuyard("workspace", "--workspace", str(folder), "status", "--json"))["tasks"]
    return int(task["job"])


def test_jobs_and_scripts_wait_for_a_busy_card_and_start_when_it_is_idle(
    foreign_process: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    task_id = str(start_workspace(tmp_path / "sweep"))
    job_id = gpuyard("submit", "--", sys.executable, "-c", SAYS_WHEN).strip()
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for command in (
            [sys.executable, "-m", "gpuyard", "run", "--vram", "2G", "--", sys.executable, "-c", SAYS_WHEN],
            [sys.executable, "-c", TAKES],
        )
    ]
    until(lambda: len(json.loads(gpuyard("leases", "--json"))["waiting"]) >= 2, "two waiting requests")
    for each in (job_id, task_id):
        why = gpuyard("why", each)
        assert f"(pid {foreign_process.pid}, user " in why
        assert "busy without a lease; the limit is 50%" in why
    time.sleep(5)
    assert [process.poll() for process in started] == [None, None]
    assert [shown("show", each)["state"] for each in (job_id, task_id)] == ["queued", "queued"]
    at = time.time()
    foreign_process.kill()
    gpuyard("wait")
    times = [float(process.communicate(timeout=DEADLINE_S)[0]) - at for process in started]
    times += [float(Path(shown("show", each)["log"]).read_text()) - at for each in (job_id, task_id)]
    assert max(times) < 30
