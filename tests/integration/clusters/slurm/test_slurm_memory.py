"""Two kinds of Slurm: it ends jobs over their `--mem` itself, or the node kills them without a word."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.clusters.conftest import start_on_slurm
from tests.integration.queue_fixture import QueueUnderTest, until
from tests.slurm_cluster import SlurmCluster, needs_slurm

pytestmark = needs_slurm
HOLD_150_MB = "import sys, time; held = bytearray(150 << 20); time.sleep(float(sys.argv[1]))"


@pytest.fixture(scope="module")
def limiting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("limiting"), limits_memory=True) as cluster:
        yield cluster


@pytest.fixture
def queue_there(
    limiting: SlurmCluster, own_queue: QueueUnderTest, monkeypatch: pytest.MonkeyPatch, unmeasured: None
) -> QueueUnderTest:
    return start_on_slurm(limiting, own_queue, monkeypatch)


def requests_of(queue: QueueUnderTest, job_id: int) -> list[str]:
    return [each["request"]["text"] for each in queue.job(job_id)["attempts"]]


def test_a_job_over_its_mem_ran_out_of_memory_and_gets_more(queue_there: QueueUnderTest) -> None:
    job_id = queue_there.submit(sys.executable, "-c", HOLD_150_MB, "6", ram="120M", gpus=0)
    queue_there.wait()
    job = queue_there.job(job_id)
    assert [each["outcome"] for each in job["attempts"]] == ["out-of-memory", "succeeded"], job["reason"]
    first, second = requests_of(queue_there, job_id)
    assert "--mem=120M " in first
    assert "--mem=512M " in second


def test_a_supervisor_that_is_killed_near_its_mem_lacked_memory(queue_there: QueueUnderTest, tmp_path: Path) -> None:
    """As by a node's own rule: nothing but the killed processes is left, and Slurm says that the job failed."""
    job_id = queue_there.submit(
        "sh", "-c", f'[ $GPUYARD_OOM_COUNT = 0 ] && exec {sys.executable} -c "$0" 600', HOLD_150_MB, ram="180M", gpus=0
    )
    queue_there.until_state(job_id, "running")
    shared = queue_there.home / "slurm" / "submissions"

    def is_measured() -> bool:
        return any('"ram_mb":15' in path.read_text() for path in shared.glob("*/0.usage"))

    until(is_measured, "a measurement of its RAM")
    [started] = shared.glob("*/0.started")
    supervisor = json.loads(started.read_text())["pid"]
    os.kill(supervisor, signal.SIGKILL)
    queue_there.until_state(job_id, "queued", "pending", "running", "succeeded", "failed")
    until(lambda: queue_there.job(job_id)["attempts"][0]["outcome"] is not None, "the end of its first attempt")
    first = queue_there.job(job_id)["attempts"][0]
    assert first["outcome"] == "out-of-memory", first
    assert queue_there.job(job_id)["growth"]["ram_mb"] > 180
    queue_there.wait()
