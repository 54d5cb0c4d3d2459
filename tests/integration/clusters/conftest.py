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
    return start_on_slurm(slurm, own_queue, monkeypatch, 'gpu_memory = "24G"\nshard_mb = 1024\n')


@pytest.fixture
def on_ray(ray_cluster: RayCluster, own_queue: QueueUnderTest, unmeasured: None) -> QueueUnderTest:
    return start_on_ray(ray_cluster, own_queue)


def start_on_slurm(
    cluster: SlurmCluster, queue: QueueUnderTest, monkeypatch: pytest.MonkeyPatch, settings: str = ""
) -> QueueUnderTest:
    """Start a queue that sends its jobs to this Slurm, with further settings of `[slurm]`."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    configure(queue.home, f'[queue]\nengine = "slurm"\n[slurm]\npoll_s = 1\n{settings}')
    queue.start()
    return queue


def start_on_ray(cluster: RayCluster, queue: QueueUnderTest) -> QueueUnderTest:
    """Start a queue that sends its jobs to this Ray."""
    address = f'[ray]\naddress = "{cluster.address}"\npoll_s = 1\ngpu_memory = "24G"\n'
    configure(queue.home, f'[queue]\nengine = "ray"\n{address}')
    queue.start()
    return queue


def configure(home: Path, text: str) -> None:
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(text)


@pytest.fixture
def waiting(queue: QueueUnderTest) -> QueueUnderTest:
    """A paused queue."""
    queue.post("/pause")
    return queue
