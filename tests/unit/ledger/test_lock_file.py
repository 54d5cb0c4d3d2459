import errno
import os
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from gpuyard.ledger.lock_file import HeldFile, LedgerScan, LockFile
from gpuyard.system import file_locks as owner_locks
from tests.in_time import wait_until_gone
from tests.unit.ledger import DEADLINE_S, child, wait_for_message


def held(folder: Path, *, may_clean: bool = False) -> list[HeldFile]:
    scan = LedgerScan(folder)
    found = list(scan.held_files())
    if may_clean:
        scan.remove_dead()
    return found


def hold(connection: Connection, path: Path) -> None:
    file = LockFile(path, b"mine")
    connection.send(file.id)
    wait_for_message(connection)


def test_a_held_file_is_found_with_its_content_and_its_owner_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        file = LockFile(tmp_path / "a.lease", b"content")
    finally:
        os.umask(before)
    (found,) = held(tmp_path, may_clean=True)
    assert (found.name, found.content, found.uid) == ("a.lease", b"content", os.getuid())
    assert file.path.stat().st_mode & 0o777 == 0o644, "other users can read it"
    file.release()


def test_releasing_removes_the_file_and_can_be_repeated_also_after_leaving_it(tmp_path: Path) -> None:
    file = LockFile(tmp_path / "a.lease", b"")
    file.release()
    file.release()
    assert list(tmp_path.iterdir()) == []
    file = LockFile(tmp_path / "a.lease", b"")
    file.leave()
    assert held(tmp_path) == []
    file.release()


@pytest.mark.parametrize("number", [errno.EROFS, errno.EPERM, errno.EACCES, errno.EIO])
def test_a_file_that_cannot_be_removed_is_released_nevertheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    file = LockFile(tmp_path / "a.lease", b"")
    heir = os.dup(file.descriptor)  # as a program has it that the script started

    def refuse(path: Path) -> None:
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        file.release()
    assert file.descriptor == -1
    assert held(tmp_path) == []
    assert f"{file.path} has ended, but cannot be removed: {os.strerror(number)}" in caplog.text
    os.close(heir)


def test_a_file_is_closed_to_other_users_until_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []
    hold = owner_locks.try_hold

    def note_mode(descriptor: int) -> bool:
        modes.append(os.fstat(descriptor).st_mode & 0o777)
        return hold(descriptor)

    monkeypatch.setattr(owner_locks, "try_hold", note_mode)
    LockFile(tmp_path / "a.lease", b"").release()
    assert modes == [0o600]


def test_a_file_that_was_dropped_is_not_held(tmp_path: Path) -> None:
    LockFile(tmp_path / "a.lease", b"")
    assert held(tmp_path) == []


def test_the_file_of_a_killed_holder_is_not_held_and_is_removed_by_cleaning(tmp_path: Path) -> None:
    path = tmp_path / "a.lease"
    with child(hold, path) as holder:
        holder.receive()
        assert [found.name for found in held(tmp_path, may_clean=True)] == [path.name]
        holder.kill()
    assert held(tmp_path) == []
    assert path.exists()
    assert held(tmp_path, may_clean=True) == []
    assert not path.exists()


def release_in_a_fork(connection: Connection, path: Path) -> None:
    file = LockFile(path, b"")
    pid = os.fork()
    if pid == 0:
        file.release()
        os._exit(0)
    os.waitpid(pid, 0)
    connection.send("done")
    wait_for_message(connection)


def test_a_release_in_a_forked_child_does_not_release_the_parents_lock(tmp_path: Path) -> None:
    with child(release_in_a_fork, tmp_path / "a.lease") as parent:
        parent.receive()
        assert len(held(tmp_path, may_clean=True)) == 1


def leave_it_to_a_fork(connection: Connection, path: Path) -> None:
    file = LockFile(path, b"")
    pid = os.fork()
    if pid:
        connection.send(pid)
    wait_for_message(connection)
    file.leave()


def test_a_fork_keeps_the_file_after_its_parent_was_killed(tmp_path: Path) -> None:
    with child(leave_it_to_a_fork, tmp_path / "a.lease") as parent:
        heir = parent.receive()
        parent.kill()
        assert len(held(tmp_path, may_clean=True)) == 1
        os.kill(heir, signal.SIGKILL)
        wait_until_gone(heir)
        assert held(tmp_path, may_clean=True) == []


def keep_it_from_a_fork(connection: Connection, path: Path) -> None:
    file = LockFile(path, b"", is_inherited=False)
    if not os.fork():
        connection.send(os.getpid())  # sent by the fork itself: by now it has closed its parent's files
    wait_for_message(connection)
    file.release()


def test_a_fork_does_not_keep_a_file_that_is_not_inheritable(tmp_path: Path) -> None:
    """Such as a ticket: a fork that kept it would block all requests behind it."""
    with child(keep_it_from_a_fork, tmp_path / "a.lease") as parent:
        fork = parent.receive()
        assert len(held(tmp_path)) == 1
        parent.kill()
        assert held(tmp_path) == []
        os.kill(fork, signal.SIGKILL)


def test_a_program_that_inherits_the_descriptor_keeps_the_file_after_its_parent(tmp_path: Path) -> None:
    file = LockFile(tmp_path / "a.lease", b"")
    program = subprocess.Popen(
        [sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[file.descriptor]
    )
    file.leave()
    assert len(held(tmp_path, may_clean=True)) == 1
    program.communicate(b"\n", timeout=DEADLINE_S)
    assert held(tmp_path, may_clean=True) == []


def test_other_files_are_ignored_and_not_removed(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("precious")
    (tmp_path / "link.lease").symlink_to(tmp_path / "target")
    (tmp_path / "dangling.lease").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder.lease").mkdir()
    (tmp_path / "notes.txt").write_text("buy milk")
    (tmp_path / "a.lease.bak").write_text("old")
    os.mkfifo(tmp_path / "pipe.lease")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket.lease"))
        before = sorted(tmp_path.iterdir())
        assert held(tmp_path, may_clean=True) == []
        assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "target").read_text() == "precious"


def test_an_incomplete_file_is_not_a_lease_and_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".a.lease").write_text("half a rec")
    assert held(tmp_path, may_clean=True) == []
    assert list(tmp_path.iterdir()) == []


def test_too_few_descriptors_is_an_error_and_hides_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = LockFile(tmp_path / "a.lease", b"")
    really_open = os.open

    def open_no_more(path: str, *arguments: int) -> int:
        if path.endswith(".lease"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return really_open(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_no_more)
        with pytest.raises(OSError, match="Too many open files"):
            held(tmp_path)
    file.release()


def test_a_record_that_is_too_large_or_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OSError, match="too large"):
        LockFile(tmp_path / "a.lease", b"x" * 70_000)
    assert list(tmp_path.iterdir()) == []
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: write(descriptor, content[:3]))
    with pytest.raises(OSError, match="No space left"):
        LockFile(tmp_path / "a.lease", b"a whole record")
    assert list(tmp_path.iterdir()) == []


def test_an_unheld_file_is_reused_under_the_new_name_and_a_held_file_is_not(tmp_path: Path) -> None:
    LockFile(tmp_path / "a.lease", b"a long record of a process that has ended").leave()
    inode = (tmp_path / "a.lease").stat().st_ino
    file = LockFile(tmp_path / "b.lease", b"mine", spare="a.lease")
    assert [(found.name, found.content) for found in held(tmp_path)] == [("b.lease", b"mine")]
    assert file.path.stat().st_ino == inode
    other = LockFile(tmp_path / "c.lease", b"another's", spare="b.lease")
    assert [(found.name, found.content) for found in held(tmp_path)] == [
        ("b.lease", b"mine"),
        ("c.lease", b"another's"),
    ]
    file.release()
    other.release()


def test_a_dead_file_with_a_second_name_is_not_used_again(tmp_path: Path) -> None:
    LockFile(tmp_path / "a.lease", b"old").leave()
    os.link(tmp_path / "a.lease", tmp_path / "elsewhere")
    file = LockFile(tmp_path / "b.lease", b"mine", spare="a.lease")
    assert not file.is_used_again
    assert (tmp_path / "elsewhere").read_bytes() == b"old"
    file.release()


def test_a_spare_that_is_missing_or_not_a_file_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "link.lease").symlink_to(tmp_path / "elsewhere")
    for name, spare in (("a.lease", "gone.lease"), ("b.lease", "link.lease")):
        file = LockFile(tmp_path / name, b"mine", spare=spare)
        assert [(found.name, found.content) for found in held(tmp_path)] == [(name, b"mine")]
        file.release()
    assert not (tmp_path / "elsewhere").exists()
