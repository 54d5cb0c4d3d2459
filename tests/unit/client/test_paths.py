"""Socket paths longer than a socket address holds: Linux has a workaround, other systems report an error."""

import gc
import socket
from pathlib import Path

import pytest

from gpuyard.client import paths
from gpuyard.client.fast_http import connect
from gpuyard.errors import EnvironmentFault
from gpuyard.system import user_sockets


@pytest.fixture
def deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / ("deep" * 30)
    folder.mkdir()
    monkeypatch.setenv("GPUYARD_HOME", str(folder))
    return folder


@pytest.mark.linux("/proc/self/fd")
def test_a_socket_can_have_a_long_path(deep: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as caller:
        user_sockets.reach(paths.socket_path(), listening.bind)
        listening.listen()
        user_sockets.reach(paths.socket_path(), caller.connect)
    assert (deep / "daemon.sock").is_socket()


def test_without_the_workaround_no_socket_stays_open(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(EnvironmentFault, match="too long for a socket") as caught:
        connect(start=False)
    assert caught.value.hint == "name a folder with a shorter path with GPUYARD_HOME"
    del caught
    gc.collect()  # a socket left open raises a ResourceWarning now, which is an error here
