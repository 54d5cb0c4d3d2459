"""Connecting to a keeper: an ended keeper and an unreachable keeper are different results."""

import errno
import os
import socket
from pathlib import Path

import pytest

from gpuyard.engines.local.keeper_connection import connect
from gpuyard.errors import EnvironmentFault


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
    with pytest.raises(EnvironmentFault, match="the keeper 17 of running jobs cannot be reached"):
        connect(str(tmp_path), 17)
