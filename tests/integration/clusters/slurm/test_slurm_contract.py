"""The engine contract on a real Slurm."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuyard.config import SlurmConfig
from gpuyard.engines.cluster.site import Site
from gpuyard.engines.cluster.slurm_site import SlurmSite
from tests.contract.cluster_engines import ClusterPlace, hasten
from tests.contract.engine import EngineContract
from tests.slurm_cluster import SlurmCluster, needs_slurm


def open_site(_: str) -> Site:
    return SlurmSite(SlurmConfig())


@needs_slurm
class TestSlurm(EngineContract):
    @pytest.fixture
    def place(
        self, slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unmeasured: None
    ) -> Iterator[ClusterPlace]:
        for name, value in slurm.environment.items():
            monkeypatch.setenv(name, value)
        slow_again = hasten()
        place = ClusterPlace(tmp_path, f"{__name__}:{open_site.__name__}", "")
        yield place
        place.close()
        slow_again()
