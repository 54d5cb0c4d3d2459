"""Scripts of `gpuyard export slurm`, run against a real Slurm."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.clusters.exported import PRINT_ARGUMENTS, PRINTED, SPECIAL_ARGUMENTS, run_exported
from tests.integration.queue_fixture import QueueUnderTest, until
from tests.slurm_cluster import SlurmCluster, needs_slurm


@pytest.fixture
def there(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Point Slurm's commands at the cluster, and cancel all jobs afterwards."""
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    yield
    output_of("scancel", "--quiet", f"--user={os.getuid()}")
    until(lambda: not output_of("squeue", "--noheader"), "an empty queue")


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@needs_slurm
def test_slurm_runs_the_exported_jobs_in_order(waiting: QueueUnderTest, there: None, tmp_path: Path) -> None:
    here = {"cwd": str(tmp_path), "gpus": 0}
    waiting.submit("sh", "-c", PRINT_ARGUMENTS, "x", *SPECIAL_ARGUMENTS, **here)
    waiting.shell(
        "test -e printed && echo $CUDA_VISIBLE_DEVICES > part{index}", array="0-4:2%2", after="1", cwd=str(tmp_path)
    )
    waiting.submit("touch", "{name}.{number}", sweep=["name=a,b", "number=0-1"], **here)
    waiting.shell("exit 3", **here)
    waiting.submit("touch", "never", after="9", **here)
    waiting.shell("test -e part4 && touch last", after="2-4", after_failed="9", **here)
    waiting.submit("touch", "held", hold=True, **here)
    assert "Slurm's job" in run_exported("slurm", tmp_path)
    until((tmp_path / "last").exists, "the end of the last job")
    assert (tmp_path / "printed").read_text() == PRINTED
    assert all((tmp_path / f"part{index}").read_text().strip() in ("0", "1") for index in (0, 2, 4))
    assert {"a.0", "a.1", "b.0", "b.1"} <= {path.name for path in tmp_path.iterdir()}
    until(
        lambda: output_of("squeue", "--noheader", "--format=%T %r") == "PENDING JobHeldUser\n",
        "only the held job in the queue",
    )
    assert not (tmp_path / "never").exists()


@needs_slurm
def test_slurm_requeues_a_failed_job_with_retries(waiting: QueueUnderTest, there: None, tmp_path: Path) -> None:
    waiting.shell("exit 3", retries=1, gpus=0, cwd=str(tmp_path))
    number = run_exported("slurm", tmp_path).split()[-1]

    def is_queued_again() -> bool:
        job = output_of("scontrol", "--oneliner", "show", "job", number)
        return "JobState=PENDING" in job and "Restarts=1" in job

    until(is_queued_again, "the requeued job")
