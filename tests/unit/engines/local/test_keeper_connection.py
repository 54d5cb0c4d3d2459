"""Connecting to a keeper: an ended keeper and an unreachable keeper are different results."""

import errno
import os
import socket
import threading
from pathlib import Path

import pytest

from gpuyard.engines.local.keeper_connection import KeeperUnreachable, connect


def test_a_keeper_without_a_live_socket_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert connect(str(tmp_path), 17) is None
    monkeypatch.chdir(tmp_path)  # a socket's address cannot hold a long path
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind("17.sock")
    assert connect(str(tmp_path), 17) is None


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EACCES, errno.EAGAIN])
def test_a_keeper_that_cannot_be_reached_is_not_taken_for_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """Otherwise its jobs would be started a second time."""

    def refuse(*_: object) -> int:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "open", refuse)
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
