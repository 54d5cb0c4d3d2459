"""Fixtures of the tests on real clusters. A cluster is started once per session; these tests share one process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.queue_fixture import QueueUnderTest
from tests.ray_cluster import RayCluster, require_ray
from tests.slurm_cluster import SlurmCluster
from tests.slurm_cluster import slurm as slurm  # noqa: PLC0414 - fixtures are found where they are named


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    require_ray()
    with RayCluster(tmp_path_factory.mktemp("ray")) as cluster:
        yield cluster


@pytest.fixture
def on_slurm(
    slurm: SlurmCluster, own_queue: QueueUnderTest, monkeypatch: pytest.MonkeyPatch, unmeasured: None
) -> QueueUnderTest:
    """A queue that sends its jobs to the cluster by default."""
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    configure(own_queue.home, '[queue]\nengine = "slurm"\n[slurm]\npoll_s = 1\ngpu_memory = "24G"\nshard_mb = 1024\n')
    own_queue.start()
    return own_queue


@pytest.fixture
def on_ray(ray_cluster: RayCluster, own_queue: QueueUnderTest, unmeasured: None) -> QueueUnderTest:
    configure(
        own_queue.home,
        f'[queue]\nengine = "ray"\n[ray]\naddress = "{ray_cluster.address}"\npoll_s = 1\ngpu_memory = "24G"\n',
    )
    own_queue.start()
    return own_queue


def configure(home: Path, text: str) -> None:
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(text)


@pytest.fixture
def waiting(queue: QueueUnderTest) -> QueueUnderTest:
    """A paused queue."""
    queue.post("/pause")
    return queue
