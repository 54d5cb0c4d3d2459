import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuyard.system import file_locks as owner_locks
from gpuyard.system.file_locks import beat, has_beaten, is_held, try_hold, unhold

linux_only = pytest.mark.linux("only Linux has locks of open files that need the right to write")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").touch()
    return tmp_path / "file"


@pytest.fixture(params=["owner locks", "flock"])
def _kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "flock":
        monkeypatch.setattr(owner_locks, "_HAS_OWNER_LOCKS", False)
    elif not hasattr(fcntl, "F_OFD_SETLK"):
        pytest.skip("this system has no locks of open files")


@pytest.fixture
def held(path: Path, _kind: None) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR)
    assert try_hold(descriptor)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def reader(path: Path, _kind: None) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def test_a_held_file_is_seen_until_it_is_released_and_refused_to_others(held: int, path: Path, reader: int) -> None:
    second = os.open(path, os.O_RDWR)
    assert not try_hold(second)
    os.close(second)
    assert is_held(reader)
    os.close(os.open(path, os.O_RDWR))
    assert is_held(reader), "closing another descriptor ended the lock"
    unhold(held)
    assert not is_held(reader)


def test_readers_do_not_see_each_other(reader: int, path: Path) -> None:
    other = os.open(path, os.O_RDONLY)
    assert not is_held(other)
    assert not is_held(reader)
    os.close(other)


def test_a_program_that_inherits_the_descriptor_holds_the_file(held: int, reader: int, path: Path) -> None:
    program = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[held])
    os.dup2(os.open(os.devnull, os.O_RDONLY), held)
    assert is_held(reader)
    program.communicate(b"\n", timeout=90)
    assert not is_held(reader)


@linux_only
def test_locks_that_a_reader_can_take_do_not_count(path: Path) -> None:
    stranger, reader = os.open(path, os.O_RDONLY), os.open(path, os.O_RDONLY)
    fcntl.flock(stranger, fcntl.LOCK_EX)
    fcntl.lockf(stranger, fcntl.LOCK_SH)
    with pytest.raises(OSError, match="Bad file descriptor"):
        fcntl.lockf(stranger, fcntl.LOCK_EX)
    assert not is_held(reader)
    os.close(reader)
    os.close(stranger)


@linux_only
def test_a_beat_counts_for_a_while_and_does_not_change_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, reader = os.open(path, os.O_RDWR), os.open(path, os.O_RDONLY)
    assert try_hold(holder)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    before = path.stat()
    assert not has_beaten(reader, 30)
    for _ in range(3):
        now += 20
        beat(holder)
        assert has_beaten(reader, 30)
    now += 31.5
    assert not has_beaten(reader, 30)
    now -= 3600  # as after a restart of the machine
    assert not has_beaten(reader, 30)
    assert is_held(reader)
    assert path.stat() == before
    os.close(holder)
    os.close(reader)
