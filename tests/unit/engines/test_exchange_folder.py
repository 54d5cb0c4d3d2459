"""The folder that a cluster engine shares with its nodes, if the configuration names none."""

from pathlib import Path

import pytest

from gpuyard.engines.open_cluster_engine import log_folders
from gpuyard.system import user_directories as local_folder
from gpuyard.system.user_directories import state_directory


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home on a network disk, beside a local disk."""
    home = tmp_path / "shared"
    (tmp_path / "mounts").write_text(f"1 1 4095:1 / / rw - ext4 x rw\n2 1 4095:2 / {home} rw - nfs4 server:/home rw\n")
    (tmp_path / "var-tmp").mkdir(mode=0o700)
    monkeypatch.setattr("gpuyard.system.user_directories.MOUNTS", str(tmp_path / "mounts"))
    monkeypatch.setattr(local_folder, "_BASES", (f"{tmp_path}/var-tmp/gpuyard-{{uid}}",))
    monkeypatch.setattr(local_folder, "_found", {})
    monkeypatch.delenv("GPUYARD_HOME")
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    return home


def test_it_is_in_the_home_on_a_network_disk_and_the_queue_is_not(home: Path, tmp_path: Path) -> None:
    queue = Path(state_directory())
    assert queue.is_relative_to(tmp_path / "var-tmp")
    own, exchange = log_folders(queue)
    assert own == queue / "logs"
    assert exchange.parent.parent == home / ".local/state/gpuyard"
    assert exchange.parent.name == (queue / "name").read_text()


def test_it_is_in_the_home_if_only_the_queue_moved(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "local"))
    queue = Path(state_directory())
    assert queue == tmp_path / "local" / "gpuyard"
    queue.mkdir(mode=0o700, parents=True)
    assert log_folders(queue)[1].is_relative_to(home / ".local/state/gpuyard")


def test_it_is_the_queues_own_folder_on_a_machine_with_local_disks_only(tmp_path: Path) -> None:
    queue = Path(state_directory())
    assert log_folders(queue) == [queue / "logs"]
