import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuyard.leases.lock_file import LockFile, LockTable
from tests.unit.leases import as_root

DEVICE, INODE = os.makedev(0xFD, 0x10), 4711
OTHER_UID = 65534


@pytest.fixture
def other_users_pid() -> Iterator[int]:
    program = subprocess.Popen(["sleep", "600"], user=OTHER_UID)
    yield program.pid
    program.kill()
    program.wait()


def table_of(tmp_path: Path, *pids: int, device: str = "fd:10", inode: int = INODE) -> Path:
    path = tmp_path / "locks"
    lines = [f"{place}: FLOCK  ADVISORY  WRITE {pid} {device}:{inode} 0 EOF" for place, pid in enumerate(pids, 1)]
    path.write_text("\n".join([*lines, "9: -> FLOCK  ADVISORY  WRITE 1 fd:10:4711 0 EOF", "garbage", ""]))
    return path


def is_held(table: Path, uid: int, maker: int = 0) -> bool:
    return LockTable(table).is_held_for(uid, maker, DEVICE, INODE)


def test_a_lock_of_a_process_of_the_owner_counts(tmp_path: Path) -> None:
    assert is_held(table_of(tmp_path, os.getpid()), os.getuid())


@as_root
@pytest.mark.linux("/proc shows the user of a process")
def test_a_lock_of_another_user_does_not_count_for_the_owner(tmp_path: Path, other_users_pid: int) -> None:
    assert not is_held(table_of(tmp_path, other_users_pid), uid=1000)
    assert is_held(table_of(tmp_path, other_users_pid), uid=OTHER_UID)


@as_root
def test_the_owners_lock_counts_beside_another_users_lock(tmp_path: Path, other_users_pid: int) -> None:
    assert is_held(table_of(tmp_path, other_users_pid, os.getpid()), uid=os.getuid())


@as_root
def test_the_same_inode_on_another_disk_is_another_file(tmp_path: Path, other_users_pid: int) -> None:
    assert is_held(table_of(tmp_path, other_users_pid, device="00:10"), uid=1000)
    assert is_held(table_of(tmp_path, other_users_pid, inode=INODE + 1), uid=1000)


@as_root
def test_the_pid_of_the_maker_may_be_reused_by_another_user(tmp_path: Path, other_users_pid: int) -> None:
    """The maker has ended and its children keep the lock; the kernel still lists the maker's pid."""
    assert is_held(table_of(tmp_path, other_users_pid), uid=1000, maker=other_users_pid)


def test_without_information_from_the_kernel_the_lock_counts(tmp_path: Path) -> None:
    assert is_held(tmp_path / "missing", uid=1000)
    assert is_held(table_of(tmp_path), uid=1000)
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert is_held(table_of(tmp_path, ended.pid), uid=1000)
    assert is_held(table_of(tmp_path, 0), uid=1000), "pid 0: a process of another container"


def test_the_table_of_the_kernel_contains_our_locks(tmp_path: Path) -> None:
    if not Path("/proc/locks").exists():
        pytest.skip("this kernel lists no locks")
    file = LockFile(tmp_path / "a.lease", b"")
    status = file.path.stat()
    key = (os.major(status.st_dev), os.minor(status.st_dev), status.st_ino)
    assert LockTable().pids[key] == (os.getpid(),)
    file.release()
    assert key not in LockTable().pids
