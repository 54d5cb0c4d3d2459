import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuyard.leases.kernel_locks import LockTable
from gpuyard.leases.lock_file import LockFile
from tests.unit.leases import as_root

DEVICE, INODE = os.makedev(0xFD, 0x10), 4711
NOBODY = 65534


@pytest.fixture
def nobodys_pid() -> Iterator[int]:
    program = subprocess.Popen(["sleep", "600"], user=NOBODY)
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


def test_a_lock_of_the_owners_own_process_is_the_owners(tmp_path: Path) -> None:
    assert is_held(table_of(tmp_path, os.getpid()), os.getuid())


@as_root
@pytest.mark.linux("/proc tells whose a process is")
def test_a_lock_of_another_user_does_not_count_for_the_owner(tmp_path: Path, nobodys_pid: int) -> None:
    assert not is_held(table_of(tmp_path, nobodys_pid), uid=1000)
    assert is_held(table_of(tmp_path, nobodys_pid), uid=NOBODY)


@as_root
def test_the_owners_lock_counts_beside_another_users_lock(tmp_path: Path, nobodys_pid: int) -> None:
    assert is_held(table_of(tmp_path, nobodys_pid, os.getpid()), uid=os.getuid())


@as_root
def test_the_same_inode_on_another_disk_is_another_file(tmp_path: Path, nobodys_pid: int) -> None:
    assert is_held(table_of(tmp_path, nobodys_pid, device="00:10"), uid=1000)
    assert is_held(table_of(tmp_path, nobodys_pid, inode=INODE + 1), uid=1000)


@as_root
def test_the_makers_pid_may_belong_to_another_user_later(tmp_path: Path, nobodys_pid: int) -> None:
    """The maker has ended and its children keep the lock; the kernel goes on telling the maker's pid."""
    assert is_held(table_of(tmp_path, nobodys_pid), uid=1000, maker=nobodys_pid)


def test_where_the_kernel_does_not_tell_the_owner_is_believed(tmp_path: Path) -> None:
    assert is_held(tmp_path / "missing", uid=1000)
    assert is_held(table_of(tmp_path), uid=1000)
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert is_held(table_of(tmp_path, ended.pid), uid=1000)
    assert is_held(table_of(tmp_path, 0), uid=1000), "a process of another container"


def test_the_kernels_own_table_knows_our_locks(tmp_path: Path) -> None:
    if not Path("/proc/locks").exists():
        pytest.skip("this kernel tells nothing")
    file = LockFile(tmp_path / "a.lease", b"")
    status = file.path.stat()
    key = (os.major(status.st_dev), os.minor(status.st_dev), status.st_ino)
    assert LockTable().pids[key] == (os.getpid(),)
    file.release()
    assert key not in LockTable().pids
