"""Locks on open files."""

import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuyard.system.file_locks import has_name, hold_lock_file, lock_within, locked, try_lock, unlock


@pytest.fixture
def files(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """One file, opened twice."""
    path = tmp_path / "file"
    opened = tuple(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC) for _ in range(2))
    yield opened[0], opened[1]
    for each in opened:
        os.close(each)


def test_an_exclusive_lock_excludes_all_and_a_shared_one_exclusive_ones(files: tuple[int, int]) -> None:
    first, second = files
    assert try_lock(first)
    assert not try_lock(second)
    assert not try_lock(second, shared=True)
    unlock(first)
    assert try_lock(second)
    unlock(second)
    assert try_lock(first, shared=True)
    assert try_lock(second, shared=True)
    unlock(second)
    assert not try_lock(second)


def test_a_lock_is_waited_for_up_to_a_limit(files: tuple[int, int]) -> None:
    first, second = files
    assert try_lock(first)
    assert not lock_within(second, 0.01)
    timer = threading.Timer(0.05, unlock, (first,))
    timer.start()
    assert lock_within(second, 10.0)
    timer.join()


def test_a_removed_file_has_no_name(files: tuple[int, int], tmp_path: Path) -> None:
    assert has_name(files[0])
    (tmp_path / "file").unlink()
    assert not has_name(files[0])


def test_a_lock_file_is_held_and_then_removed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with hold_lock_file(path):
        other = os.open(path, os.O_RDWR)
        assert not try_lock(other)
    assert try_lock(other)
    assert not has_name(other)
    assert not path.exists()
    os.close(other)


def test_a_lock_file_that_was_removed_meanwhile_does_not_count(tmp_path: Path) -> None:
    """Otherwise two processes could each hold a file of this name."""
    path = tmp_path / "lock"
    first = os.open(path, os.O_RDWR | os.O_CREAT)
    assert try_lock(first)
    entered = threading.Event()
    leave = threading.Event()

    def hold() -> None:
        with hold_lock_file(path):
            entered.set()
            leave.wait(10.0)

    holder = threading.Thread(target=hold)
    holder.start()
    path.unlink()
    os.close(first)
    assert entered.wait(10.0)
    third = os.open(path, os.O_RDWR)
    assert not try_lock(third)
    leave.set()
    holder.join()
    os.close(third)


def test_changes_to_a_locked_folder_exclude_each_other(tmp_path: Path) -> None:
    other = os.open(tmp_path, os.O_RDONLY)
    with locked(tmp_path), pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
