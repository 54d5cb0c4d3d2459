"""CPUs of real programs where `pin_cpus` is set: as many as declared, disjoint, also after the daemon was killed."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.queue_command import run
from tests.integration.queue_fixture import QueueUnderTest, until

CPUS = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
# It starts another program, which inherits the CPUs.
PROGRAM = (
    "import json, os, pathlib, subprocess, sys, time\n"
    "child = [sys.executable, '-I', '-S', '-c', 'import os; print(sorted(os.sched_getaffinity(0)))']\n"
    "print(subprocess.check_output(child, text=True).strip(), flush=True)\n"
    "while not pathlib.Path(sys.argv[1]).exists():\n"
    "    time.sleep(0.02)\n"
)
pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")


def start(queue: QueueUnderTest, gate: Path, **options: Any) -> tuple[int, set[int]]:
    """Start a program that runs until the gate exists. Return its job and the CPUs that its child may use."""
    job_id = queue.submit(sys.executable, "-I", "-S", "-c", PROGRAM, str(gate), gpus=0, **options)
    log = queue.home / "logs" / f"{job_id}.1.log"
    until(lambda: log.exists() and "]" in log.read_text(), f"the CPUs of job {job_id}")
    return job_id, set(json.loads(log.read_text()))


def test_jobs_have_cpus_of_their_own_and_a_new_daemon_does_not_give_them_away(
    own_queue: QueueUnderTest, tmp_path: Path
) -> None:
    own_queue.home.mkdir(mode=0o700)
    (own_queue.home / "config.toml").write_text("[host]\npin_cpus = true\n[queue]\ncpu_jobs = 8\n")
    own_queue.start()
    gate = tmp_path / "gate"
    first, first_cpus = start(own_queue, gate, cpus=1)
    own_queue.restart()
    _, second_cpus = start(own_queue, gate, cpus=1)
    third, third_cpus = start(own_queue, gate)
    assert (len(first_cpus), len(second_cpus)) == (1, 1)
    assert first_cpus.isdisjoint(second_cpus)
    assert third_cpus == (CPUS - first_cpus - second_cpus or CPUS)
    assert set(own_queue.job(first)["attempts"][0]["cpus"]) == first_cpus
    assert f"CPUs {next(iter(first_cpus))}" in run("show", str(first)).stdout
    assert own_queue.job(third)["attempts"][0]["cpus"] == sorted(third_cpus)
    gate.touch()
    own_queue.wait()


def test_by_default_jobs_run_on_all_cpus(queue: QueueUnderTest, tmp_path: Path) -> None:
    (tmp_path / "gate").touch()
    job_id, cpus = start(queue, tmp_path / "gate", cpus=1)
    assert cpus == CPUS
    assert queue.job(job_id)["attempts"][0]["cpus"] == []
