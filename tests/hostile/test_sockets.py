"""Attacks by a socket at which the wrong user listens, or to which the wrong user connects."""

import asyncio
import os
import socket
import stat
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from gpuyard.client.autostart import start_daemon
from gpuyard.client.client import Client
from gpuyard.client.daemon_liveness import running_pid
from gpuyard.client.fast_http import connect
from gpuyard.client.retrying import RetryingClient
from gpuyard.engines.local import keeper_connection
from gpuyard.engines.session import viewer
from gpuyard.engines.session.viewer import Loop, ViewerSockets
from gpuyard.errors import EnvironmentFault
from gpuyard.system import user_sockets
from gpuyard.ui.tui.streams import DaemonStream
from tests.fakes.queue_command import run
from tests.hostile.catalogue import attack
from tests.hostile.users import BEN, act_as, become
from tests.integration.queue_fixture import QueueUnderTest
from tests.unit.ledger import DEADLINE_S, Child, child

OWN = "set GPUYARD_HOME to another folder"


def listen(connection: Connection, path: str) -> None:
    """As Ben: listen at a path, and send what the first client sent. Closes without an answer."""
    become(BEN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        os.chmod(path, 0o777)
        listener.listen()
        connection.send("ready")
        client, _ = listener.accept()
        with client:
            client.settimeout(DEADLINE_S)
            connection.send(client.recv(1 << 20))


@pytest.fixture
def folder_of_ben(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Child]:
    """GPUYARD_HOME is a folder that Ben made first, as in /tmp. He listens at its socket."""
    home = place / "prepared"
    act_as(BEN, os.mkdir, str(home), 0o777)
    monkeypatch.setenv("GPUYARD_HOME", str(home))
    with child(listen, str(home / "daemon.sock")) as ben:
        assert ben.receive() == "ready"
        yield ben


@pytest.fixture
def socket_of_ben(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Child]:
    """GPUYARD_HOME is our own folder. Ben listens in it since a time when everyone could write to it."""
    home = place / "prepared"
    home.mkdir()
    home.chmod(0o777)
    monkeypatch.setenv("GPUYARD_HOME", str(home))
    with child(listen, str(home / "daemon.sock")) as ben:
        assert ben.receive() == "ready"
        home.chmod(0o755)
        yield ben


def refused(done: "tuple[int, str]") -> str:
    status, text = done
    assert status == 1, text
    return text


@attack(
    "make `GPUYARD_HOME` first, listen at its socket, and wait for `gpuyard submit`",
    now="refused",
)
def test_submit_to_a_folder_of_another_user(folder_of_ben: Child) -> None:
    done = run("submit", "--", "true", env={**os.environ, "SECRET": "hunter2"})
    text = refused((done.returncode, done.stderr))
    assert f"belongs to the user {BEN}, and not to you" in text
    assert OWN in text
    assert not folder_of_ben.has_message()


@attack(
    "listen at the socket in a folder that was once writable for all",
    now="refused",
)
def test_submit_to_a_socket_of_another_user(socket_of_ben: Child) -> None:
    done = run("submit", "--", "true", env={**os.environ, "SECRET": "hunter2"})
    text = refused((done.returncode, done.stderr))
    assert f"another user (uid {BEN}) listens at" in text
    assert socket_of_ben.receive() == b""


@attack("wait at such a socket for `gpuyard queue`", now="refused")
def test_read_from_a_socket_of_another_user(socket_of_ben: Child) -> None:
    with pytest.raises(EnvironmentFault, match="another user"):
        connect(start=False)
    assert socket_of_ben.receive() == b""


@attack("wait at such a socket for a script with `gpuyard.Client`", now="refused")
def test_client_of_a_socket_of_another_user(socket_of_ben: Child) -> None:
    with pytest.raises(EnvironmentFault, match="another user"):
        Client().submit("true")
    assert socket_of_ben.receive() == b""


@attack("wait at such a socket for `gpuyard wait`", now="refused")
def test_waiting_at_a_socket_of_another_user(socket_of_ben: Child) -> None:
    with pytest.raises(EnvironmentFault, match="another user"):
        RetryingClient(may_start=False)
    assert socket_of_ben.receive() == b""


@attack("wait at such a socket for `gpuyard top`", now="refused")
def test_top_of_a_socket_of_another_user(socket_of_ben: Child) -> None:
    async def ask() -> None:
        await DaemonStream(lambda _: None).ask("GET", "/status")

    with pytest.raises(EnvironmentFault, match="another user"):
        asyncio.run(ask())
    assert socket_of_ben.receive() == b""


@attack(
    "pass for the daemon that `gpuyard daemon start` waits for",
    now="refused",
)
def test_start_beside_a_socket_of_another_user(socket_of_ben: Child) -> None:
    with pytest.raises(EnvironmentFault, match="another user"):
        start_daemon(["/bin/false"])
    assert socket_of_ben.receive() == b""


@attack("replace `GPUYARD_HOME` by a link to a folder with a socket", now="refused")
def test_link_to_a_folder_with_a_socket(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    act_as(BEN, os.mkdir, str(place / "theirs"), 0o777)
    act_as(BEN, os.symlink, str(place / "theirs"), str(place / "prepared"))
    monkeypatch.setenv("GPUYARD_HOME", str(place / "prepared"))
    with child(listen, str(place / "theirs/daemon.sock")) as ben:
        assert ben.receive() == "ready"
        with pytest.raises(EnvironmentFault, match=f"the symbolic link .*prepared belongs to the user {BEN}"):
            connect(start=False)
        assert not ben.has_message()


@attack(
    "replace the folder after the command has checked it and before it connects",
    now="refused",
)
def test_swap_between_check_and_connection(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = place / "prepared"
    home.mkdir()
    monkeypatch.setenv("GPUYARD_HOME", str(home))
    act_as(BEN, os.mkdir, str(place / "theirs"), 0o777)
    reach = user_sockets.reach

    def swap_first(path: str, act: object) -> None:
        home.rename(place / "aside")
        (place / "theirs").rename(home)
        reach(path, act)  # type: ignore[arg-type]

    with child(listen, str(place / "theirs/daemon.sock")) as ben:
        assert ben.receive() == "ready"
        monkeypatch.setattr(user_sockets, "reach", swap_first)
        with pytest.raises(EnvironmentFault, match="another user"):
            connect(start=False)
        assert ben.receive() == b""


@attack("make a named pipe of `daemon.lock`, which every command opens", now="refused")
def test_pipe_in_place_of_the_lock(place: Path) -> None:
    home = place / "prepared"
    home.mkdir()
    home.chmod(0o777)
    act_as(BEN, os.mkfifo, str(home / "daemon.lock"))
    home.chmod(0o755)
    with pytest.raises(EnvironmentFault, match=r"daemon\.lock cannot be written: it is not a regular file"):
        running_pid(home / "daemon.lock")


@attack("listen in place of the keeper of running jobs", now="refused")
def test_keeper_of_another_user(place: Path) -> None:
    keepers = place / "keepers"
    keepers.mkdir()
    keepers.chmod(0o777)
    with child(listen, str(keepers / "17.sock")) as ben:
        assert ben.receive() == "ready"
        keepers.chmod(0o700)
        with pytest.raises(EnvironmentFault, match="another user"):
            keeper_connection.connect(str(keepers), 17)
        assert ben.receive() == b""


def receive_from(path: str) -> bytes:
    """As Ben: connect, and return what the other end sends first."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(DEADLINE_S)
        client.connect(path)
        return client.recv(4096)


def open_to_all(path: Path, below: Path) -> None:
    """As if its owner had opened it by mistake: the kernel's word on who connects still counts."""
    for each in (path, *path.parents):
        if below in each.parents or each == below:
            each.chmod(0o666 if stat.S_ISSOCK(each.stat().st_mode) else 0o755)


@attack("connect to a keeper whose socket its owner has opened", now="refused")
def test_connect_to_a_keeper(own_home: Path, queue: QueueUnderTest) -> None:
    _, gate = queue.start_gated()
    (keeper,) = (own_home / "keepers").glob("*.sock")
    open_to_all(keeper, own_home)
    assert act_as(BEN, receive_from, str(keeper)) == b""
    gate.write_text("go\n")


def type_keys(path: str) -> bytes:
    """As Ben: type into another user's task, and return what he sees of it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(DEADLINE_S)
        client.connect(path)
        try:
            client.sendall(viewer.frame(viewer.KEYS, b"rm -rf ~\n"))
        except BrokenPipeError:
            return b""
        return client.recv(4096)


@attack("type into the session of another user's task", now="refused")
def test_type_into_a_session(place: Path) -> None:
    sessions = place / "sessions"
    typed: list[bytes] = []
    sessions.mkdir(mode=0o700)
    loop = Loop()
    sockets = ViewerSockets(loop, str(sessions), "1.1", {viewer.KEYS: typed.append}, lambda: None)
    sockets.show(b"output\n")
    open_to_all(sessions / "1.1.sock", sessions)
    with child(_type, str(sessions / "1.1.sock")) as ben:
        while not ben.has_message():
            loop.after(0.01, lambda: None)
            loop.turn()
        assert ben.receive() == b""
    assert (typed, sockets.viewers) == ([], {})
    sockets.end(0, "", 0)


def _type(connection: Connection, path: str) -> None:
    become(BEN)
    try:
        connection.send(type_keys(path))
    except ConnectionResetError:
        connection.send(b"")


@attack(
    "listen in place of a task, and wait for keys that its user types",
    now="refused",
)
def test_session_of_another_user(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = place / "sessions"
    sessions.mkdir()
    sessions.chmod(0o777)
    with child(listen, str(sessions / "1.1.sock")) as ben:
        assert ben.receive() == "ready"
        sessions.chmod(0o700)
        monkeypatch.setattr("sys.argv", ["viewer", str(sessions), "1.1"])
        monkeypatch.delenv("TMUX", raising=False)
        with pytest.raises(SystemExit, match="cannot show this task: another user"):
            viewer.main()
        assert ben.receive() == b""


@attack("leave a file at the place of the socket", now="refused")
def test_file_in_place_of_the_socket(place: Path) -> None:
    home = place / "prepared"
    home.mkdir(mode=0o700)
    (home / "daemon.sock").symlink_to("/etc/passwd")
    with pytest.raises(EnvironmentFault, match="exists and is not a socket"):
        user_sockets.bind(str(home / "daemon.sock"))
    assert (home / "daemon.sock").is_symlink()
