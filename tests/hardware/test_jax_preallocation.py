"""On a machine with an NVIDIA card and JAX: a program that takes most of the card at its start, JAX's default."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gpuyard.policy.preallocation import JUMP_PART
from tests.hardware.test_queue import gpuyard, is_ready, shown
from tests.integration.queue_fixture import until

pytestmark = pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no NVIDIA card")

# Multiplies a small matrix on the card until the file exists.
WORK = """
import os, sys, time
import jax
block = jax.device_put(jax.numpy.ones((1024, 1024)), jax.devices("cuda")[0])
(block @ block).block_until_ready()
print("ready", os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE"), flush=True)
while not os.path.exists(sys.argv[1]):
    (block @ block).block_until_ready()
    time.sleep(0.05)
"""
HAS_CARD = "import jax; jax.devices('cuda')"
ADVICE = "set XLA_PYTHON_CLIENT_PREALLOCATE=false"


@pytest.fixture(autouse=True)
def queue(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A queue of its own, for jobs that do not configure JAX."""
    if find_spec("jax") is None:
        pytest.skip("there is no jax")
    for name in [name for name in os.environ if name.startswith(("XLA_", "JAX_", "CUDA_VISIBLE_"))]:
        monkeypatch.delenv(name)
    own = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    asked = subprocess.run([sys.executable, "-c", HAS_CARD], env=own, capture_output=True, timeout=120, check=False)
    if asked.returncode != 0:
        pytest.skip("jax has no CUDA device")
    own_home.mkdir(mode=0o700)
    yield
    subprocess.run([sys.executable, "-m", "gpuyard", "cancel", "all"], timeout=120, check=False)
    subprocess.run([sys.executable, "-m", "gpuyard", "wait"], timeout=120, check=False)
    gpuyard("daemon", "stop")


def submit(tmp_path: Path) -> int:
    """Submit the program, with nothing declared."""
    program = tmp_path / "train.py"
    program.write_text(WORK)
    return int(gpuyard("submit", "--", sys.executable, str(program), str(tmp_path / "go")))


def finish(tmp_path: Path, job_id: int) -> Any:
    (tmp_path / "go").touch()
    until(lambda: shown("show", str(job_id))["state"] == "succeeded", "the end of the job")
    return shown("show", str(job_id))


def taken(job: Any) -> float:
    """Return which part of the card the job took at most."""
    (peak_mb,) = job["attempts"][-1]["peaks_mb"].values()
    (total_mb,) = (device["memory_total_mb"] for device in shown("devices")["devices"])
    return float(peak_mb / total_mb)


def events(job_id: int) -> list[str]:
    return [event["kind"] for event in json.loads(gpuyard("history", str(job_id), "--json"))["events"]]


def test_preallocation_is_recognised_at_the_first_run_and_show_says_what_to_set(tmp_path: Path) -> None:
    job_id = submit(tmp_path)
    until(lambda: is_ready(job_id), "the program on the card")
    until(lambda: "preallocates" in events(job_id), "the event, while the program runs")
    assert shown("show", str(job_id))["state"] == "running"
    assert any(ADVICE in note for note in shown("show", str(job_id))["advice"])
    assert ADVICE in gpuyard("show", str(job_id))
    job = finish(tmp_path, job_id)
    assert taken(job) >= JUMP_PART
    assert events(job_id).count("preallocates") == 1


def test_with_preallocation_off_the_program_takes_what_it_needs(tmp_path: Path, own_home: Path) -> None:
    (own_home / "config.toml").write_text('[packing]\npreallocation = "off"\n')
    job_id = submit(tmp_path)
    until(lambda: is_ready(job_id), "the program on the card")
    until(lambda: shown("show", str(job_id))["attempts"][-1]["peaks_mb"], "its measured memory")
    job = finish(tmp_path, job_id)
    assert "ready false\n" in gpuyard("logs", str(job_id))
    assert taken(job) < 0.2
    assert "preallocates" not in events(job_id)
    assert job["advice"] == []
