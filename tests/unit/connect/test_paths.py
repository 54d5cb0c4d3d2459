"""A socket's path may be longer than its address has room for: Linux has a way around, other systems say so."""

import gc
import socket
from pathlib import Path

import pytest

from gpuyard.connect import paths
from gpuyard.connect.fast_http import connect
from gpuyard.errors import EnvironmentFault


@pytest.fixture
def deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / ("deep" * 30)
    folder.mkdir()
    monkeypatch.setenv("GPUYARD_HOME", str(folder))
    return folder


@pytest.mark.linux("/proc/self/fd")
def test_a_socket_can_be_deep_down(deep: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as caller:
        paths.reach(paths.socket_path(), listening.bind)
        listening.listen()
        paths.reach(paths.socket_path(), caller.connect)
    assert (deep / "daemon.sock").is_socket()


def test_where_there_is_no_way_around_the_user_is_told_and_nothing_is_left_open(
    deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(EnvironmentFault, match="too long for a socket") as caught:
        connect(start=False)
    assert caught.value.hint == "name a folder with a shorter path with GPUYARD_HOME"
    del caught
    gc.collect()  # a socket that nobody closed is a warning now, and so an error
