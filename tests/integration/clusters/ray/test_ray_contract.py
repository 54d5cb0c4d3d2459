"""The engine contract on a real Ray."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuyard.config import RayConfig
from gpuyard.engines.cluster.ray_site import RaySite
from gpuyard.engines.cluster.site import Site
from tests.contract.cluster_engines import ClusterPlace, hasten
from tests.contract.engine import EngineContract
from tests.ray_cluster import RayCluster


def open_site(address: str) -> Site:
    return RaySite(RayConfig(address=address))


class TestRay(EngineContract):
    @pytest.fixture
    def place(self, ray_cluster: RayCluster, tmp_path: Path, unmeasured: None) -> Iterator[ClusterPlace]:
        slow_again = hasten()
        place = ClusterPlace(tmp_path, f"{__name__}:{open_site.__name__}", ray_cluster.address)
        yield place
        place.close()
        slow_again()
