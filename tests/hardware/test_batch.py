"""On a machine with an NVIDIA card and PyTorch: a batch of real runs, gated by load and memory of the card."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.executables import write_executable
from tests.hardware.test_queue import gpuyard

pytestmark = pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no NVIDIA card")

# Has the interface that `gpuyard datagen` expects: renders frames with matrix products that partly load the card.
SIMULATOR = """
import argparse, pathlib, shutil, time
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--mode"); parser.add_argument("--headless", action="store_true")
parser.add_argument("--prune-empty", action="store_true"); parser.add_argument("--prune-output-root")
parser.add_argument("--output-root", type=pathlib.Path); parser.add_argument("--seed", type=int)
parser.add_argument("--max-frames", type=int); parser.add_argument("--gigabytes", type=float, default=3)
arguments = parser.parse_args()
torch.manual_seed(arguments.seed)
held = torch.ones(int(arguments.gigabytes * 1024), 1024, 256, device="cuda")
scene = torch.rand(4096, 4096, device="cuda")
frames = 0 if arguments.seed % 5 == 0 else arguments.max_frames
for frame in range(arguments.max_frames):
    ends = time.monotonic() + 0.25
    while time.monotonic() < ends:
        scene = torch.nn.functional.normalize(scene @ scene)
        torch.cuda.synchronize()
    time.sleep(0.25)
    if frame < frames:
        torch.save(scene[:8, :8].cpu(), arguments.output_root / f"frame-{frame:04d}.pt")
print(f"frames: {frames}")
if arguments.prune_empty and not frames:
    shutil.move(str(arguments.output_root), arguments.prune_output_root)
"""
BUSY, FULL = 70, 10_000


@pytest.fixture(autouse=True)
def queue(own_home: Path) -> Any:
    pytest.importorskip("torch")
    yield own_home
    subprocess.run([sys.executable, "-m", "gpuyard", "cancel", "all"], timeout=120, check=False)
    gpuyard("daemon", "stop")


def test_a_batch_of_real_runs_stays_within_its_limits(tmp_path: Path) -> None:
    simulator = tmp_path / "sim_view"
    write_executable(simulator, f"#!{sys.executable}\n{SIMULATOR}")
    result = subprocess.run(
        [
            sys.executable, "-m", "gpuyard", "datagen", "--program", str(simulator), "--count", "10",
            "--concurrency", "4", "--max-gpu", str(BUSY), "--max-gpu-mem-mb", str(FULL), "--run-vram", "4G",
            "--max-frames", "6", "--stagger", "1s", "--steady", "1s", "--output-root", str(tmp_path / "out"),
            "--sample-log", str(tmp_path / "log.csv"), "--json",
        ],
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert (summary["runs"], summary["succeeded"], summary["pruned"], summary["frames"]) == (10, 10, 2, 48)
    assert summary["unknown"] == []
    with (tmp_path / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    launches = [row for row in rows if row["event"] == "launch"]
    assert len(launches) == 10
    for row in launches:
        assert float(row["gpu_smoothed_percent"]) <= BUSY
        assert float(row["gpu_memory_judged_mb"]) <= FULL
        assert float(row["gpu_memory_charged_mb"]) <= FULL
        assert int(row["running"]) < 4
