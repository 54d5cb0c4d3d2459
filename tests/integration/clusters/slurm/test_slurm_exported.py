"""Scripts of `gpuyard export slurm`, run against a real Slurm."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.clusters.exported import SAID, SAY, STRANGE, play
from tests.integration.queue_fixture import QueueUnderTest, until
from tests.slurm_cluster import SlurmCluster, needs_slurm


@pytest.fixture
def there(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Slurm's commands find the cluster, on which nothing is left afterwards."""
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    yield
    said("scancel", "--quiet", f"--user={os.getuid()}")
    until(lambda: not said("squeue", "--noheader"), "no job is left")


def said(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


@needs_slurm
def test_slurm_runs_what_waited_here_in_its_order(waiting: QueueUnderTest, there: None, tmp_path: Path) -> None:
    here = {"cwd": str(tmp_path), "gpus": 0}
    waiting.submit("sh", "-c", SAY, "x", *STRANGE, **here)
    waiting.shell(
        "test -e said && echo $CUDA_VISIBLE_DEVICES > part{index}", array="0-4:2%2", after="1", cwd=str(tmp_path)
    )
    waiting.submit("touch", "{name}.{number}", sweep=["name=a,b", "number=0-1"], **here)
    waiting.shell("exit 3", **here)
    waiting.submit("touch", "never", after="9", **here)
    waiting.shell("test -e part4 && touch last", after="2-4", after_failed="9", **here)
    waiting.submit("touch", "held", hold=True, **here)
    assert "Slurm's job" in play("slurm", tmp_path)
    until((tmp_path / "last").exists, "the end of the last")
    assert (tmp_path / "said").read_text() == SAID
    assert all((tmp_path / f"part{index}").read_text().strip() in ("0", "1") for index in (0, 2, 4))
    assert {"a.0", "a.1", "b.0", "b.1"} <= {path.name for path in tmp_path.iterdir()}
    until(
        lambda: said("squeue", "--noheader", "--format=%T %r") == "PENDING JobHeldUser\n", "only the held one is left"
    )
    assert not (tmp_path / "never").exists()


@needs_slurm
def test_slurm_queues_again_what_failed_and_has_retries(waiting: QueueUnderTest, there: None, tmp_path: Path) -> None:
    waiting.shell("exit 3", retries=1, gpus=0, cwd=str(tmp_path))
    number = play("slurm", tmp_path).split()[-1]

    def is_again_in_line() -> bool:
        told = said("scontrol", "--oneliner", "show", "job", number)
        return "JobState=PENDING" in told and "Restarts=1" in told

    until(is_again_in_line, "its place in the line")
