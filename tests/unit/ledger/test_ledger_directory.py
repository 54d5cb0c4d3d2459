import os
import stat
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.ledger.ledger_mutex import find_closed_parent, make_shared_directory, prepare_directory
from tests.unit.ledger import as_root, child


def test_a_network_file_system_is_refused_with_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mountinfo"
    monkeypatch.setattr("gpuyard.system.user_directories.MOUNTS", str(mounts))
    mounts.write_text(f"22 1 0:40 / {tmp_path} rw - nfs4 server:/home rw\n")
    with pytest.raises(EnvironmentFault, match=r"is on a network file system \(nfs4\)") as caught:
        prepare_directory(tmp_path / "locks")
    assert caught.value.hint == "set GPUYARD_LOCK_DIR to a directory on a local disk"


def test_a_private_directory_is_its_users_and_one_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    folder = prepare_directory(tmp_path / "new" / "locks")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert prepare_directory(folder) == folder
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFault, match=r"file/locks cannot be created: Not a directory") as caught:
        prepare_directory(tmp_path / "file" / "locks")
    assert "GPUYARD_LOCK_DIR" in (caught.value.hint or "")
    with pytest.raises(EnvironmentFault, match="cannot be created: File exists"):
        prepare_directory(tmp_path / "file")
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFault, match="cannot be made a shared lease directory: Not a directory"):
        make_shared_directory(tmp_path / "file" / "locks")


def test_a_shared_directory_that_is_not_sticky_is_reported(tmp_path: Path) -> None:
    for mode in (0o777, 0o770):
        tmp_path.chmod(mode)
        with pytest.raises(EnvironmentFault, match="the directory is shared, but not sticky"):
            prepare_directory(tmp_path)
    tmp_path.chmod(0o1777)
    assert prepare_directory(tmp_path) == tmp_path


def prepare_as_another(connection: Connection, folder: Path) -> None:
    os.setuid(65534)
    try:
        prepare_directory(folder)
    except EnvironmentFault as error:
        connection.send((error.message, error.hint))


@as_root
def test_a_directory_without_write_permission_is_reported(tmp_path: Path) -> None:
    # pytest's own folder is closed to other users and would give another error.
    with child(prepare_as_another, Path("/var")) as other:
        message, hint = other.receive()
    assert message == "you cannot write to the lease directory /var"
    assert "GPUYARD_LOCK_DIR" in hint
    with child(prepare_as_another, Path("/var/gpuyard-of-another")) as other:
        assert other.receive()[0] == "the lease directory /var/gpuyard-of-another cannot be created: Permission denied"


def test_a_shared_directory_is_open_and_sticky_or_for_its_group_only(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        folder = make_shared_directory(tmp_path / "new" / "locks")
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    group = (os.getgroups() or [os.getgid()])[-1] if os.getuid() else 65534
    folder = make_shared_directory(tmp_path / "locks", group)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o3770
    assert folder.stat().st_gid == group


def test_a_folder_with_other_files_is_not_opened_to_all_users(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    mode = tmp_path.stat().st_mode
    with pytest.raises(UserError, match=r"thesis\.tex"):
        make_shared_directory(tmp_path)
    assert tmp_path.stat().st_mode == mode


def test_a_parent_folder_closed_to_other_users_is_reported(tmp_path: Path) -> None:
    (tmp_path / "shut" / "lab").mkdir(parents=True)
    (tmp_path / "shut").chmod(0o700)
    assert find_closed_parent(tmp_path / "shut" / "lab") == tmp_path / "shut"
