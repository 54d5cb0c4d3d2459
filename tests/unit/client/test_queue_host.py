"""Which machine a queue belongs to."""

from pathlib import Path

import pytest

from gpuyard.client import queue_host
from gpuyard.client.queue_host import QueueElsewhere, adopt_queue, hold_queue, known_hosts, refuse_other_machine
from gpuyard.client.queue_host import refuse_second_queue as refuse
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.system import processes as machine_identity
from gpuyard.system.user_directories import LocalFolder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    be("alpha", monkeypatch)
    monkeypatch.setattr(queue_host, "_PAUSE_S", 0.0)
    (tmp_path / "state").mkdir(mode=0o700)
    return str(tmp_path / "state")


def be(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go on as if on this machine."""
    for module in (machine_identity, queue_host):
        monkeypatch.setattr(module, "machine_id", lambda: f"id of {host}")
        monkeypatch.setattr(module, "boot_id", lambda: f"boot of {host}")
        monkeypatch.setattr(module, "host_name", lambda: host)


def replace_home(folder: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let the folder stand for one on a network disk, which is returned."""
    wanted = f"{Path(folder).parent}/home"
    place = LocalFolder(wanted, folder, "nfs4", "it is on a network file system (nfs4)")
    monkeypatch.setattr(queue_host, "find_state_directory", lambda: place)
    return wanted


def test_the_first_machine_keeps_a_queue_without_a_daemon(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with hold_queue(folder) as is_ours:
        assert is_ours()
        be("bravo", monkeypatch)
        with pytest.raises(QueueElsewhere, match=r"belongs to the host alpha \(its daemon was started there on"):
            refuse_other_machine(folder)
        with pytest.raises(QueueElsewhere), hold_queue(folder):
            pass
        be("alpha", monkeypatch)
    be("bravo", monkeypatch)
    with pytest.raises(QueueElsewhere, match=r"belongs to the host alpha \(its daemon is stopped\)"):
        refuse_other_machine(folder)


@pytest.mark.parametrize("kind", ["ext4", "fuse.juicefs"])
def test_a_machine_that_was_renamed_and_restarted_keeps_the_queue_on_its_local_disk(
    folder: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = Path(folder).parent / "mounts"
    mounts.write_text(f"1 1 0:1 / / rw - {kind} x rw\n")
    monkeypatch.setattr("gpuyard.system.user_directories.MOUNTS", str(mounts))
    with hold_queue(folder):
        pass
    for module in (machine_identity, queue_host):
        monkeypatch.setattr(module, "boot_id", lambda: "a later boot")
        monkeypatch.setattr(module, "host_name", lambda: "renamed")
    if kind == "ext4":
        with hold_queue(folder) as is_ours:
            assert is_ours()
    else:
        with pytest.raises(QueueElsewhere, match="belongs to the host alpha"):
            refuse_other_machine(folder)


def test_the_record_of_a_machine_s_earlier_name_is_removed(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = replace_home(folder, monkeypatch)
    monkeypatch.setattr(queue_host, "file_system", lambda _: "ext4")
    with hold_queue(folder):
        pass
    be("bravo", monkeypatch)
    other = f"{Path(folder).parent}/bravo"
    Path(other).mkdir(mode=0o700)
    replace_home(other, monkeypatch)
    with hold_queue(other):
        pass
    be("alpha", monkeypatch)
    replace_home(folder, monkeypatch)
    for module in (machine_identity, queue_host):
        monkeypatch.setattr(module, "boot_id", lambda: "a later boot")
        monkeypatch.setattr(module, "host_name", lambda: "renamed")
    for _ in range(2):
        with hold_queue(folder):
            assert sorted(each.host for each in known_hosts(wanted)) == ["bravo", "renamed"]


def test_a_daemon_notices_that_another_machine_adopted_its_queue(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with hold_queue(folder) as is_ours:
        be("bravo", monkeypatch)
        with pytest.raises(UserError, match="belongs to alpha"):
            adopt_queue(folder, "charlie")
        adopt_queue(folder, "alpha.cluster.example")
        with pytest.raises(UserError, match="belongs to no other machine"):
            adopt_queue(folder, "alpha")
        be("alpha", monkeypatch)
        assert not is_ours()
    with pytest.raises(QueueElsewhere, match="belongs to the host bravo"):
        refuse_other_machine(folder)


def test_a_record_that_a_crash_left_empty_belongs_to_no_machine(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(folder, "queue.host").touch(0o600)
    refuse_other_machine(folder)
    with hold_queue(folder):
        be("bravo", monkeypatch)
        with pytest.raises(QueueElsewhere):
            refuse_other_machine(folder)
        be("alpha", monkeypatch)


@pytest.mark.parametrize("content", ["garbage", '{"host": "-oProxyCommand=x", "address": "a", "program": []}'])
def test_a_record_that_cannot_be_read_stops_the_daemon(folder: str, content: str) -> None:
    path = Path(folder, "queue.host")
    path.write_text(content)
    with pytest.raises(EnvironmentFault, match=r"queue\.host") as caught:
        refuse_other_machine(folder)
    assert "remove the file" in (caught.value.hint or "")


def test_a_machine_without_a_queue_learns_of_another_one(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = replace_home(folder, monkeypatch)
    with hold_queue(folder):
        assert [each.host for each in known_hosts(wanted)] == ["alpha"]
        be("bravo", monkeypatch)
        other = f"{Path(folder).parent}/bravo"
        Path(other).mkdir(mode=0o700)
        replace_home(other, monkeypatch)
        with pytest.raises(QueueElsewhere, match=r"your queue is on the host alpha .* and bravo has none"):
            refuse(other)
        with hold_queue(other):
            refuse(other)  # it has one now
        be("alpha", monkeypatch)
        replace_home(folder, monkeypatch)
    be("charlie", monkeypatch)
    third = f"{Path(folder).parent}/charlie"
    Path(third).mkdir(mode=0o700)
    replace_home(third, monkeypatch)
    refuse(third)  # both daemons were stopped
