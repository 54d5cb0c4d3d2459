"""What tests on real clusters share. A cluster is started once for all of them, which stay in one process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.queue_fixture import Yard
from tests.ray_cluster import RayCluster, require_ray
from tests.slurm_cluster import SlurmCluster
from tests.slurm_cluster import slurm as slurm  # noqa: PLC0414 - fixtures are found where they are named


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    require_ray()
    with RayCluster(tmp_path_factory.mktemp("ray")) as cluster:
        yield cluster


@pytest.fixture
def on_slurm(slurm: SlurmCluster, own_yard: Yard, monkeypatch: pytest.MonkeyPatch, unmeasured: None) -> Yard:
    """A queue whose jobs go to the cluster unless they say otherwise."""
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    configure(own_yard.home, '[queue]\nengine = "slurm"\n[slurm]\npoll_s = 1\ngpu_memory = "24G"\nshard_mb = 1024\n')
    own_yard.start()
    return own_yard


@pytest.fixture
def on_ray(ray_cluster: RayCluster, own_yard: Yard, unmeasured: None) -> Yard:
    configure(
        own_yard.home,
        f'[queue]\nengine = "ray"\n[ray]\naddress = "{ray_cluster.address}"\npoll_s = 1\ngpu_memory = "24G"\n',
    )
    own_yard.start()
    return own_yard


def configure(home: Path, text: str) -> None:
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(text)


@pytest.fixture
def waiting(yard: Yard) -> Yard:
    """A queue in which nothing starts."""
    yard.post("/pause")
    return yard
