"""Attacks on another user's queue."""

import os
import socket
from pathlib import Path

import pytest

from tests.hostile.catalogue import attack
from tests.hostile.users import BEN, act_as
from tests.integration.queue_fixture import QueueUnderTest


def connect(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(path)


@attack("connect to another user's daemon", now="refused")
def test_connect_to_the_daemon(own_home: Path, queue: QueueUnderTest) -> None:
    queue.submit("true")
    with pytest.raises(PermissionError):
        act_as(BEN, connect, str(own_home / "daemon.sock"))
    assert os.stat(own_home).st_mode & 0o077 == 0
