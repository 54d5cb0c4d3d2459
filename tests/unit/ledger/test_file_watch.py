import ctypes
import os
import resource
import shutil
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from gpuyard.ledger.file_watch import FileWatch
from gpuyard.ledger.lock_file import LockFile
from tests.unit.ledger import DEADLINE_S, child, wait_for_message


def settle(notice: FileWatch) -> None:
    """Wait out the short polls that follow a change."""
    for _ in range(20):
        notice.wait(0.0)


def waited_s(notice: FileWatch, timeout_s: float) -> float:
    started = time.monotonic()
    notice.wait(timeout_s)
    return time.monotonic() - started


def hold_until_message(connection: Connection, path: Path) -> None:
    file = LockFile(path, b"")
    connection.send("held")
    wait_for_message(connection)
    file.release()


def noticed(notice: FileWatch) -> bool:
    """Return whether a change ended a wait that would otherwise outlast the deadline."""
    return waited_s(notice, 2 * DEADLINE_S) < DEADLINE_S


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_release_in_another_process_or_its_death_ends_the_wait(tmp_path: Path, *, is_killed: bool) -> None:
    with child(hold_until_message, tmp_path / "a.lease") as holder:
        holder.receive()
        notice = FileWatch(tmp_path)
        settle(notice)
        if is_killed:
            holder.kill()
        else:
            holder.send("release")
        assert noticed(notice)
        notice.give_back()


def test_a_wait_ends_at_its_timeout_and_may_have_none(tmp_path: Path) -> None:
    notice = FileWatch(tmp_path)
    settle(notice)
    assert 0.02 <= waited_s(notice, 0.03) < DEADLINE_S
    assert waited_s(notice, -1.0) < DEADLINE_S
    LockFile(tmp_path / "a.lease", b"").release()
    assert waited_s(notice, float("inf")) < DEADLINE_S
    notice.give_back()


def test_a_recreated_directory_is_watched_again(tmp_path: Path) -> None:
    folder = tmp_path / "locks"
    folder.mkdir()
    FileWatch(folder).give_back()
    shutil.rmtree(folder)
    folder.mkdir()
    notice = FileWatch(folder)
    settle(notice)
    LockFile(folder / "a.lease", b"").release()
    assert noticed(notice)
    notice.give_back()


def test_a_change_before_the_wait_does_not_end_it(tmp_path: Path) -> None:
    FileWatch(tmp_path).give_back()
    for place in range(2000):
        LockFile(tmp_path / f"{place}.lease", b"").release()
    notice = FileWatch(tmp_path)
    settle(notice)
    assert waited_s(notice, 0.03) >= 0.02
    notice.give_back()


def wait_with_many_files(connection: Connection, folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (3000, 3000))
    for _ in range(1500):
        os.dup(0)
    notice = FileWatch(folder)
    settle(notice)
    connection.send("waiting")
    connection.send(noticed(notice))


def test_a_program_with_thousands_of_open_files_can_wait(tmp_path: Path) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 3000:
        pytest.skip("no thousands of open files are allowed here")
    with child(wait_with_many_files, tmp_path) as waiter:
        assert waiter.receive() == "waiting"
        LockFile(tmp_path / "a.lease", b"").release()
        assert waiter.receive() is True


@pytest.mark.parametrize("lack", ["the call", "a descriptor", "a watch"])
def test_without_inotify_the_directory_is_polled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lack: str) -> None:
    class Libc:
        def __init__(self, *_: object, **__: object) -> None:
            if lack != "the call":
                self.inotify_init1 = lambda _: -1 if lack == "a descriptor" else os.open("/dev/null", os.O_RDONLY)
                self.inotify_add_watch = lambda *_: -1

    monkeypatch.setattr(ctypes, "CDLL", Libc)
    notice = FileWatch(tmp_path / "never watched before")
    assert waited_s(notice, 2 * DEADLINE_S) < DEADLINE_S
    notice.give_back()
