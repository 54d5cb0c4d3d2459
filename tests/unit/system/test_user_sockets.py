"""Unix sockets between processes of one user."""

import os
import socket
import stat
from pathlib import Path

import pytest

from gpuyard.system import user_sockets
from gpuyard.system.private_files import PrivateFileError


def test_both_ends_know_each_others_user(tmp_path: Path) -> None:
    path = str(tmp_path / "a.sock")
    with user_sockets.bind(path) as listening:
        listening.listen()
        connection = user_sockets.connect(path)
        accepted, _ = listening.accept()
        with accepted:
            assert user_sockets.peer_uid(accepted) == user_sockets.peer_uid(connection) == os.geteuid()
        connection.close()


def test_another_user_is_noticed_before_a_byte_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "a.sock")
    with user_sockets.bind(path) as listening:
        listening.listen()
        monkeypatch.setattr(user_sockets, "peer_uid", lambda _: 4242)
        with pytest.raises(PrivateFileError, match=f"another user .uid 4242. listens at {path}: nothing was sent"):
            user_sockets.connect(path)
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.recv(1) == b""


@pytest.mark.parametrize("uid", [0, None])
def test_root_is_accepted_and_so_is_an_unknown_user(monkeypatch: pytest.MonkeyPatch, uid: int | None) -> None:
    monkeypatch.setattr(user_sockets, "peer_uid", lambda _: uid)
    one, other = socket.socketpair()
    with one, other:
        assert user_sockets.is_same_user(one)


def test_a_socket_is_its_owners_alone_and_replaces_only_that_of_a_dead_process(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        user_sockets.bind(str(tmp_path / "a.sock")).close()
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "a.sock").stat().st_mode) == 0o600
    for _ in range(2):
        user_sockets.bind(str(tmp_path / "a.sock")).close()
    (tmp_path / "file.sock").touch()
    with pytest.raises(PrivateFileError, match="exists and is not a socket"):
        user_sockets.bind(str(tmp_path / "file.sock"))


def test_a_folder_that_others_can_write_to_is_refused_at_both_ends(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    for use in (user_sockets.connect, user_sockets.bind):
        with pytest.raises(PrivateFileError, match="other users can write to"):
            use(str(tmp_path / "a.sock"))


def test_without_a_listener_the_error_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        user_sockets.connect(str(tmp_path / "missing" / "a.sock"))
    user_sockets.bind(str(tmp_path / "a.sock")).close()
    with pytest.raises(ConnectionRefusedError):
        user_sockets.connect(str(tmp_path / "a.sock"))
