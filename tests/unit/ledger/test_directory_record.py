"""The record of a queue's lease directory: which leases move along, and who is refused."""

import os
from pathlib import Path

import pytest

from gpuyard.config import state_dir
from gpuyard.errors import EnvironmentFault
from gpuyard.ledger.directory_in_use import RECORD, check_directory, move_in
from gpuyard.ledger.drains_and_marks import add_drain, remove_drains
from gpuyard.ledger.ledger import Ledger
from gpuyard.ledger.lock_file import LockFile
from gpuyard.ledger.records import encode_lease
from gpuyard.model.lease import Claim, Share
from gpuyard.system import file_locks as owner_locks
from gpuyard.system.processes import this_process


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Path]:
    """Three lease directories; a daemon has recorded the first, and has ended."""
    monkeypatch.setenv("GPUYARD_HOME", str(tmp_path / "home"))
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    for folder in (tmp_path / "home", one, two, three):
        folder.mkdir(mode=0o700)
    os.close(move_in(one))
    return one, two, three


def recorded_directory() -> Path:
    """Return the first line of the record: the directory of the queue."""
    return Path((state_dir() / RECORD).read_text().split("\n")[0])


def is_held(path: Path) -> bool:
    with path.open("rb") as file:
        return owner_locks.is_held(file.fileno())


def test_a_lease_is_held_in_both_directories_and_ends_in_both(folders: tuple[Path, Path, Path]) -> None:
    one, two, _ = folders
    lease = LockFile(one / "1-a.lease", b'{"shares": []}')  # without shares: a suspended job's
    os.close(move_in(two))
    assert is_held(two / "1-a.lease")
    assert recorded_directory() == two
    lease.release()
    assert not is_held(two / "1-a.lease")


def test_leases_move_along_through_several_directories(folders: tuple[Path, Path, Path]) -> None:
    one, two, three = folders
    first = LockFile(one / "1-a.lease", b"{}")
    os.close(move_in(two))
    second = LockFile(two / "2-b.lease", b"{}")
    os.close(move_in(three))
    assert is_held(three / "1-a.lease")
    assert is_held(three / "2-b.lease")
    os.close(move_in(one))
    assert is_held(one / "2-b.lease"), "back again"
    first.release()
    second.release()
    os.close(move_in(one))
    assert os.listdir(two) == os.listdir(three) == []
    check_directory(three)


def test_a_directory_that_lost_its_sticky_bit_can_be_left(folders: tuple[Path, Path, Path]) -> None:
    one, two, _ = folders
    lease = LockFile(one / "1-a.lease", b"{}")
    one.chmod(0o777)
    os.close(move_in(two))
    assert recorded_directory() == two
    assert is_held(two / "1-a.lease")
    lease.release()


def test_an_unreachable_directory_can_be_left(
    folders: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, _ = folders
    real = os.stat

    def closed(path: str | Path, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
        if path in (one, str(one)):
            raise PermissionError(13, "Permission denied", str(one))
        return real(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(os, "stat", closed)
    os.close(move_in(two))
    assert recorded_directory() == two


def test_a_directory_with_a_link_to_itself_in_its_place_holds_no_leases(folders: tuple[Path, Path, Path]) -> None:
    one, two, _ = folders
    one.rmdir()
    one.symlink_to(one)
    check_directory(two)
    os.close(move_in(two))
    assert recorded_directory() == two


def test_a_drain_that_was_removed_does_not_come_back_with_its_directory(folders: tuple[Path, Path, Path]) -> None:
    one, two, _ = folders
    add_drain(one, "GPU-0", "hot", 1.0)
    os.close(move_in(two))
    assert [drain.device_id for drain in Ledger(two).read_drains()] == ["GPU-0"]
    remove_drains(two, "GPU-0")
    os.close(move_in(one))
    assert Ledger(one).read_drains() == ()


def test_a_lease_that_is_released_ends_in_all_directories(folders: tuple[Path, Path, Path]) -> None:
    one, two, _ = folders
    lease = LockFile(one / "1-a.lease", encode_lease(this_process("mine"), Claim(shares=(Share(device_id="GPU-0"),))))
    os.close(move_in(two))
    Ledger(two).end("1-a")
    assert Ledger(one).leases() == Ledger(two).leases() == ()
    check_directory(two)
    lease.leave()


def test_claims_elsewhere_are_refused_while_the_queue_or_leases_run(folders: tuple[Path, Path, Path]) -> None:
    one, two, _ = folders
    check_directory(two)
    lease = LockFile(one / "1-a.lease", b"{}")
    with pytest.raises(EnvironmentFault, match=r"you hold 1 lease in .*one"):
        check_directory(two)
    lease.release()
    check_directory(two)
    running = move_in(one)
    with pytest.raises(EnvironmentFault, match=r"your queue uses the lease directory .*one"):
        check_directory(two)
    (one.parent / "link").symlink_to(one)
    for same in (one, one.parent / "link"):
        check_directory(same)
    os.close(running)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"/nowhere\n", b"/\xff\x00\n", b"relative"])
def test_a_record_that_names_no_directory_refuses_nothing(folders: tuple[Path, Path, Path], content: bytes) -> None:
    one, two, _ = folders
    (one.parent / "home" / RECORD).write_bytes(content)
    check_directory(two)
    os.close(move_in(two))
    assert recorded_directory() == two
