"""The client finds the daemon, starts it if none runs, and reports the result of a request."""

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.client import autostart, paths
from gpuyard.client.daemon_liveness import running_pid
from gpuyard.client.fast_http import DaemonConnection, NoDaemon, connect, connect_early, decode, encode
from gpuyard.config import state_dir
from gpuyard.daemon.server.connection import ConnectionLimits
from gpuyard.daemon.server.http_messages import HttpError, Request, Response
from gpuyard.errors import EnvironmentFault, UserError
from tests.fakes.daemon import COMMAND, DEADLINE_S, echo, served, wait_until

pytestmark = pytest.mark.usefixtures("unmeasured")

HEAVY = (
    "asyncio", "click", "contextlib", "json", "msgspec", "psutil", "re", "rich", "socket", "subprocess",
    "typing",
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The daemon that `start_daemon` starts; it is ended after the test."""
    monkeypatch.setattr(autostart, "DAEMON", COMMAND)
    yield
    pid = running_pid(paths.lock_path())
    if pid is not None:
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: running_pid(paths.lock_path()) is None)


def die(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: running_pid(paths.lock_path()) is None)


def python(script: str, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True)


# Requests


def test_a_request_arrives_unchanged(own_home: Path) -> None:
    with served(own_home / "daemon.sock"), connect(start=False) as client:
        got = client.request("POST", "/jobs/a b", {"tag": "ä&=?"}, {"env": {"A": "ü\n"}, "n": [1, None, True, 2.5]})
    assert got["path"] == "/jobs/a b"
    assert got["query"] == {"tag": "ä&=?"}
    assert json.loads(got["body"]) == {"env": {"A": "ü\n"}, "n": [1, None, True, 2.5]}


def test_the_caller_works_while_the_daemon_works_on_the_answer(own_home: Path) -> None:
    is_working = threading.Event()

    def answer(request: Request) -> Response:
        assert is_working.wait(DEADLINE_S)
        return echo(request)

    with served(own_home / "daemon.sock", answer), connect(start=False) as client:
        assert client.request("GET", "/next", meanwhile=is_working.set)["path"] == "/next"


def test_an_early_connection_is_used_for_the_request(own_home: Path) -> None:
    with served(own_home / "daemon.sock") as daemon, connect_early() as client:
        wait_until(lambda: len(daemon.server.open) == 1)
        client.request("GET", "/")
        assert len(daemon.server.open) == 1


@pytest.mark.usefixtures("stand_in")
def test_an_early_connection_starts_no_daemon_before_the_request(own_home: Path) -> None:
    with connect_early() as client:
        assert running_pid(paths.lock_path()) is None
        assert client.request("GET", "/")["pid"] == running_pid(paths.lock_path())


def test_a_connection_is_kept_for_the_next_request(own_home: Path) -> None:
    with served(own_home / "daemon.sock") as daemon, connect(start=False) as client:
        for _ in range(100):
            client.request("GET", "/")
            assert len(daemon.server.open) == 1


def test_long_responses_and_bodies_arrive_complete(own_home: Path) -> None:
    long = "x" * 20_000_000
    with served(own_home / "daemon.sock"), connect(start=False) as client:
        assert client.request("POST", "/", body=long)["body"] == f'"{long}"'


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, UserError), (404, UserError), (409, UserError), (413, UserError), (500, EnvironmentFault),
     (503, EnvironmentFault), (507, EnvironmentFault)],
)  # fmt: skip
def test_an_error_of_the_daemon_is_raised_with_its_message(own_home: Path, status: int, kind: type[UserError]) -> None:
    def refuse(request: Request) -> Response:
        raise HttpError(status, "there is no job 17", hint="see `gpuyard queue`")

    with served(own_home / "daemon.sock", refuse), connect(start=False) as client:
        with pytest.raises(kind, match="there is no job 17") as raised:
            client.request("GET", "/jobs/17")
        assert raised.value.hint == "see `gpuyard queue`"


def test_a_body_that_is_too_long_is_refused_even_before_all_of_it_is_sent(own_home: Path) -> None:
    with served(own_home / "daemon.sock") as daemon, connect(start=False) as client:
        with pytest.raises(UserError, match="over 64 MiB"):
            client.request("POST", "/jobs", body="x" * 70_000_000)
        assert client.request("GET", "/")["path"] == "/"
        assert len(daemon.server.open) == 1


def test_a_daemon_with_too_many_connections_reports_it(own_home: Path) -> None:
    with served(own_home / "daemon.sock", limits=ConnectionLimits(connections=1)), connect(start=False) as first:
        first.request("GET", "/")
        with connect(start=False) as second, pytest.raises(EnvironmentFault, match="which is its limit"):
            second.request("GET", "/")


def test_a_response_after_the_timeout_is_not_mistaken_for_the_next(own_home: Path) -> None:
    async def wait_for_ever() -> Response:
        return await asyncio.Future()

    with (
        served(own_home / "daemon.sock", lambda asked: wait_for_ever() if asked.path == "/v1/ever" else echo(asked)),
        connect(start=False) as client,
    ):
        with pytest.raises(EnvironmentFault, match=r"within 0\.05 s"):
            client.request("GET", "/ever", timeout_s=0.05)
        assert client.request("GET", "/next", timeout_s=DEADLINE_S)["path"] == "/next"


@pytest.mark.parametrize("answer", [b"SSH-2.0\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{]}"])
def test_an_invalid_response_is_reported_as_unreadable(own_home: Path, answer: bytes) -> None:
    own_home.mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(paths.socket_path())
        listening.listen()

        def answer_once() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=answer_once)
        thread.start()
        with connect(start=False) as client, pytest.raises(EnvironmentFault, match="cannot be read"):
            client.request("GET", "/")
        thread.join(DEADLINE_S)


def test_a_socket_path_longer_than_an_address_works(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUYARD_HOME", str(own_home / ("d" * 150)))
    with served(Path(paths.socket_path())), connect(start=False) as client:
        assert client.request("GET", "/there")["path"] == "/there"


# A daemon that is missing, or ends


def test_without_a_daemon_an_error_is_raised(own_home: Path) -> None:
    with pytest.raises(NoDaemon, match="no daemon runs"):
        connect(start=False)


def test_a_started_daemon_outlives_the_process_that_started_it(own_home: Path, stand_in: None) -> None:
    script = (
        "import os, sys\nfrom gpuyard.client import autostart\nfrom gpuyard.client.fast_http import connect\n"
        "autostart.DAEMON = tuple(sys.argv[1:])\nprint(connect(start=True).request('GET', '/')['pid'])\n"
    )
    pid = int(python(script, *COMMAND).communicate(timeout=DEADLINE_S)[0])
    with connect(start=False) as client:
        assert client.request("GET", "/")["pid"] == pid == running_pid(paths.lock_path())
    daemon = psutil.Process(pid)
    assert daemon.cwd() == "/"
    assert os.getsid(pid) != os.getsid(0)
    assert daemon.terminal() is None
    assert stat.S_IMODE((own_home / "daemon.log").stat().st_mode) == 0o600


def test_a_daemon_inherits_no_descriptors_and_no_signal_handling(own_home: Path, stand_in: None) -> None:
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    script = (
        "import signal, sys\nfrom gpuyard.client.autostart import start_daemon\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "start_daemon(sys.argv[1:])\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", script, *COMMAND], pass_fds=[writing])
    assert starter.wait(DEADLINE_S) == 0
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read() == b""  # at end of file: no process holds the other end
    pid = running_pid(paths.lock_path())
    assert pid is not None
    os.kill(pid, signal.SIGHUP)
    wait_until(lambda: running_pid(paths.lock_path()) is None)


def test_processes_that_start_a_daemon_at_once_all_reach_the_same_one(own_home: Path, stand_in: None) -> None:
    script = (
        "import sys\nfrom gpuyard.client import autostart\nfrom gpuyard.client.fast_http import connect\n"
        "autostart.DAEMON = tuple(sys.argv[1:])\nprint(connect(start=True).request('GET', '/')['pid'])\n"
    )
    starters = [python(script, *COMMAND) for _ in range(6)]
    outputs = {starter.communicate(timeout=90)[0] for starter in starters}
    assert [starter.returncode for starter in starters] == [0] * 6
    assert outputs == {f"{running_pid(paths.lock_path())}\n"}


def test_a_daemon_that_cannot_start_is_reported_with_its_last_log_lines(own_home: Path) -> None:
    own_home.mkdir()
    (own_home / "daemon.log").write_text("an old line\n")
    with pytest.raises(EnvironmentFault, match="no space for a queue") as raised:
        autostart.start_daemon([sys.executable, "-c", "raise SystemExit('no space for a queue')"])
    assert "an old line" not in raised.value.message
    assert str(own_home / "daemon.log") in str(raised.value.hint)


def test_a_daemon_that_never_listens_is_a_timeout(own_home: Path) -> None:
    script = "import os, select\nprint(os.getpid(), flush=True)\nselect.select([], [], [])"
    with pytest.raises(EnvironmentFault, match=r"within 0\.5 s"):
        autostart.start_daemon([sys.executable, "-c", script], timeout_s=0.5)
    wait_until(lambda: (own_home / "daemon.log").read_text() != "")
    os.kill(int((own_home / "daemon.log").read_text()), signal.SIGKILL)


@pytest.mark.linux
def test_the_daemon_ignores_neither_sigint_nor_sigquit(home: Path) -> None:
    """A shell starts the daemon in the background, and makes such programs ignore both."""
    assert autostart.start_daemon()
    lines = Path(f"/proc/{running_pid(paths.lock_path())}/status").read_text().splitlines()
    ignored = next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:"))
    assert not ignored & (1 << signal.SIGINT - 1 | 1 << signal.SIGQUIT - 1)


def test_a_missing_daemon_program_is_an_error(own_home: Path) -> None:
    with pytest.raises(EnvironmentFault, match="ended as soon as it was started"):
        autostart.start_daemon(["/nowhere/daemon"])


def test_a_read_request_is_repeated_at_the_next_daemon(own_home: Path, stand_in: None) -> None:
    with connect(start=True) as client:
        before = client.request("GET", "/")["pid"]
        die(before)
        assert client.request("GET", "/")["pid"] == running_pid(paths.lock_path()) != before


def test_a_request_that_may_have_been_carried_out_is_repeated_only_if_harmless(own_home: Path, stand_in: None) -> None:
    with connect(start=True) as client:
        with pytest.raises(EnvironmentFault, match="ended before it answered"):
            client.request("POST", "/die", body=[])
        wait_until(lambda: running_pid(paths.lock_path()) is None)
        with pytest.raises(EnvironmentFault, match="3 daemons ended"):
            client.request("POST", "/die", body=[], is_repeatable=True)


def test_a_request_that_never_reached_the_old_daemon_goes_to_the_next(own_home: Path, stand_in: None) -> None:
    with connect(start=True) as client:
        die(client.request("GET", "/")["pid"])
        assert client.request("POST", "/jobs", body=[])["path"] == "/jobs"


def test_a_request_that_kills_the_daemon_is_not_repeated_forever(own_home: Path, stand_in: None) -> None:
    with connect(start=True) as client, pytest.raises(EnvironmentFault, match="3 daemons ended"):
        client.request("GET", "/die")


def test_a_client_that_may_not_start_a_daemon_does_not_start_the_next(own_home: Path, stand_in: None) -> None:
    connect(start=True).close()
    with DaemonConnection(paths.socket_path(), may_start=False) as client:
        die(client.request("GET", "/")["pid"])
        with pytest.raises(NoDaemon):
            client.request("GET", "/")


# Speed


def test_reaching_the_daemon_imports_nothing_heavy(own_home: Path) -> None:
    script = (
        "import sys\nbefore = set(sys.modules)\nfrom gpuyard.client.fast_http import connect\n"
        "connect(start=False).request('POST', '/jobs', {'a': 'b'}, {'c': [1]})\n"
        "print(*set(sys.modules) - before)\n"
    )
    with served(own_home / "daemon.sock"):
        loaded = python(script).communicate(timeout=DEADLINE_S)[0].split()
    assert "gpuyard.client.fast_http" in loaded
    assert set(loaded).intersection(HEAVY) == set()


@pytest.mark.parametrize(
    "variables",
    [
        {"GPUYARD_HOME": "/some/where"},
        {"GPUYARD_HOME": "~/yard"},
        {"GPUYARD_HOME": "relative/yard"},
        {"XDG_STATE_HOME": "/x/state"},
        {"XDG_STATE_HOME": ""},
        {"XDG_STATE_HOME": "relative/state"},
        {},
    ],
)
def test_the_client_and_the_configuration_agree_on_the_folder(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GPUYARD_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Path(paths.state_folder()) == state_dir()
    assert Path(paths.socket_path()) == state_dir() / "daemon.sock"


@given(JSON)
def test_json_is_written_and_read_as_the_standard_library_does(value: object) -> None:
    assert json.loads(encode(value)) == value == decode(json.dumps(value))
    assert decode(f" {json.dumps(value, indent=2)}\n") == value


@pytest.mark.parametrize("text", ["", " ", "{", "[1,]", "{} {}", "nul", '"a', "\ufeff1"])
def test_invalid_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"JSON|value|Expecting|Unterminated|Illegal"):
        decode(text)


def test_values_that_json_cannot_express_are_refused() -> None:
    with pytest.raises(TypeError, match="bytes cannot be encoded"):
        encode({"cwd": b"/"})
