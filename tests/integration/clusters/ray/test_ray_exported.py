"""A script of `gpuyard export ray`, run against a real Ray."""

from pathlib import Path

import pytest

from tests.integration.clusters.exported import PRINT_ARGUMENTS, PRINTED, SPECIAL_ARGUMENTS, run_exported
from tests.integration.queue_fixture import QueueUnderTest, until
from tests.ray_cluster import RayCluster


@pytest.mark.full
def test_ray_runs_the_exported_jobs_in_order(waiting: QueueUnderTest, ray_cluster: RayCluster, tmp_path: Path) -> None:
    waiting.submit("sh", "-c", PRINT_ARGUMENTS, "x", *SPECIAL_ARGUMENTS, cwd=str(tmp_path), gpus=0)
    waiting.shell("test -e printed && touch last", after="1", cwd=str(tmp_path), gpus=0)
    waiting.submit("touch", "never", after_failed="1", cwd=str(tmp_path), gpus=0)
    assert "3: not submitted" in run_exported("ray", tmp_path, RAY_API_SERVER_ADDRESS=ray_cluster.address)
    until((tmp_path / "last").exists, "the end of the last job")
    assert (tmp_path / "printed").read_text() == PRINTED
