"""On a machine with an NVIDIA card and PyTorch: the energy of a job against the power that `nvidia-smi` prints."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gpuyard.probes.local_machine import snapshot
from tests.hardware.test_queue import gpuyard, shown

pytestmark = pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no NVIDIA card")

SECONDS = 20.0
# Full load for most of the time, with a rest in the middle: the mean of two readings would miss that.
WORK = f"""
import time
import torch
a = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
began = time.monotonic()
while (ran := time.monotonic() - began) < {SECONDS}:
    if {SECONDS} * 0.4 < ran < {SECONDS} * 0.6:
        time.sleep(0.05)
    else:
        for _ in range(50):
            a @ a
        torch.cuda.synchronize()
"""


@pytest.fixture
def queue(own_home: Path) -> Iterator[Path]:
    pytest.importorskip("torch")
    yield own_home
    gpuyard("daemon", "stop")


@pytest.fixture
def powers(tmp_path: Path) -> Iterator[Path]:
    """A file to which `nvidia-smi` writes time and power of GPU 0 ten times a second."""
    path = tmp_path / "powers.csv"
    query = ["--query-gpu=timestamp,power.draw", "--format=csv,noheader,nounits", "--loop-ms=100", "--id=0"]
    with path.open("w") as file, subprocess.Popen(["nvidia-smi", *query], stdout=file) as process:
        yield path
        process.terminate()


def integrate(path: Path, since: float, until: float) -> float:
    """Return the joules between two moments, by the trapezoidal rule."""
    lines = [line.split(", ") for line in path.read_text().splitlines() if line.count(",") == 1]
    points = [(datetime.strptime(at, "%Y/%m/%d %H:%M:%S.%f").astimezone().timestamp(), float(watts))
              for at, watts in lines]  # fmt: skip
    inside = [(at, watts) for at, watts in points if since <= at <= until]
    assert len(inside) > (until - since) * 5, "nvidia-smi was too slow"
    joules = sum((b - a) * (p + q) / 2 for (a, p), (b, q) in pairwise(inside))
    return joules * (until - since) / (inside[-1][0] - inside[0][0])


def seconds(iso: str) -> float:
    return datetime.fromisoformat(iso).timestamp()


@pytest.mark.usefixtures("queue")
def test_the_energy_of_a_job_alone_on_its_card_is_the_integral_of_its_power(powers: Path) -> None:
    job_id = gpuyard("submit", "--exclusive", "--device", "0", "--", sys.executable, "-c", WORK).strip()
    gpuyard("wait", job_id)
    job: Any = shown("show", job_id)
    assert job["state"] == "succeeded"
    expected = integrate(powers, seconds(job["started_at"]), seconds(job["ended_at"]))
    assert job["energy"]["basis"] == "counter"
    assert job["energy"]["joules"] == pytest.approx(expected, rel=0.05)
    assert job["energy"]["measured_s"] == pytest.approx(job["elapsed_s"], rel=0.05)


def test_the_card_reports_the_energy_it_has_used() -> None:
    [card] = [device for device in snapshot().devices if device.index == 0 and device.parent is None]
    assert card.energy_j is not None
