"""The supervisor's meter on a real card: the peak memory from which the queue learns."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuyard.engines.cluster import node_supervisor
from gpuyard.engines.cluster.submission_dir import SubmissionDirs
from gpuyard.ports import Launch
from gpuyard.probes.local_machine import snapshot

HELD_MB = 4096
PROGRAM = (
    "import torch, time\n"
    f"held = torch.empty({HELD_MB} * 1048576, dtype=torch.uint8, device='cuda')\n"
    "torch.cuda.synchronize(); time.sleep(8); print(held.numel())\n"
)


@pytest.fixture(autouse=True)
def _card() -> None:
    pytest.importorskip("torch", reason="there is no PyTorch")
    if not any(device.vendor == "nvidia" for device in snapshot().devices):
        pytest.skip("there is no NVIDIA card")


def test_the_peak_memory_of_a_program_is_recorded_with_its_end(tmp_path: Path) -> None:
    submissions = SubmissionDirs(tmp_path)
    log = tmp_path / "1.1.log"
    launch = Launch(
        job_id=1,
        attempt=1,
        command=(sys.executable, "-c", PROGRAM),
        cwd="/",
        environment=dict(os.environ),
    )
    submissions.write("token", [(launch, str(log))])
    done = subprocess.run(
        [*node_supervisor.command(submissions.path("token"), submissions.digest("token")), "0"],
        check=False,
        timeout=240,
    )
    assert (done.returncode, log.read_text().strip()) == (0, str(HELD_MB * 1048576))
    ended = submissions.traces("token")[0].ended
    assert ended is not None
    assert ended.usage is not None
    [peak] = ended.usage.peaks_mb.values()
    assert HELD_MB <= peak < HELD_MB + 2048, "the program's memory and CUDA's context"
    assert ended.usage.ram_mb is not None
    assert ended.usage.ram_mb > 100
