"""Connecting to a keeper: an ended keeper and an unreachable keeper are different results."""

import errno
import os
import socket
import threading
from pathlib import Path

import pytest

from gpuyard.engines.local import keeper_connection
from gpuyard.engines.local.keeper_connection import KeeperConnection, KeeperUnreachable, connect
from gpuyard.system import user_sockets


def test_a_keeper_without_a_live_socket_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert connect(str(tmp_path), 17) is None
    monkeypatch.chdir(tmp_path)  # a socket's address cannot hold a long path
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind("17.sock")
    assert connect(str(tmp_path), 17) is None


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EACCES, errno.EAGAIN])
def test_an_unreachable_keeper_is_not_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """Otherwise its jobs would be started a second time."""

    def refuse(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(user_sockets, "reach", refuse)
    with pytest.raises(KeeperUnreachable):
        connect(str(tmp_path), 17)


def test_a_keeper_that_accepts_no_connection_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that was stopped, after a few daemons were killed that had connected to it."""
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind("17.sock")
        stopped.listen(0)
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(8)]
        for each in waiting:
            each.settimeout(0)
            each.connect_ex("17.sock")
        raised: list[Exception] = []

        def reach() -> None:
            try:
                connect(str(tmp_path), 17)
            except KeeperUnreachable as error:
                raised.append(error)

        thread = threading.Thread(target=reach, daemon=True)
        thread.start()
        thread.join(30)
        for each in waiting:
            each.close()
        assert len(raised) == 1


class CrowdedLink:
    """A link to a keeper that lets nothing through at first, because too many descriptors are under way."""

    def __init__(self, refusals: int) -> None:
        self._left = refusals
        self.sent = b""

    def settimeout(self, _: float) -> None: ...

    def sendmsg(self, content: list[memoryview], _: object) -> int:
        if self._left:
            self._left -= 1
            raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
        self.sent += bytes(content[0])
        return len(content[0])


def test_a_message_waits_while_too_many_descriptors_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    link = CrowdedLink(3)
    assert KeeperConnection(17, link).send(b"launch", [4, 5])  # type: ignore[arg-type]
    assert link.sent == b"launch"
    monkeypatch.setattr(keeper_connection, "_SEND_TIMEOUT_MS", 0)
    assert not KeeperConnection(17, CrowdedLink(10**9)).send(b"launch", [4, 5])  # type: ignore[arg-type]
