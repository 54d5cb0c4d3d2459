"""A daemon that is stopped, hangs, or ends while it is asked: no client waits without a limit, and nothing is lost."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gpuyard import Client
from gpuyard.client import autostart, fast_http, paths
from gpuyard.client.daemon_liveness import SilentDaemon, running_pid
from gpuyard.client.fast_http import connect, dial
from gpuyard.client.retrying import RetryingClient
from gpuyard.client.transports import SocketTransport
from gpuyard.engines.local.attempt_processes import is_stopped
from gpuyard.errors import EnvironmentFault
from gpuyard.system import user_sockets
from gpuyard.version import __version__
from tests.fakes.daemon import COMMAND, wait_until
from tests.integration.queue_fixture import QueueUnderTest

pytestmark = pytest.mark.usefixtures("unmeasured")
DEADLINE_S = 90.0


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_http, "_CHECK_S", 0.2)


@pytest.fixture
def stopped(own_home: Path, impatient: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A daemon that is stopped."""
    monkeypatch.setattr(autostart, "DAEMON", COMMAND)
    connect(start=True).close()
    pid = running_pid(paths.lock_path())
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped(pid))
    yield pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: running_pid(paths.lock_path()) is None)


def in_thread(act: Callable[[], object]) -> BaseException | None:
    """Return what the call raises, or None. Fail if it does not return within a minute."""
    raised: list[BaseException | None] = []

    def record() -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - shown by the test
            raised.append(error)
        else:
            raised.append(None)

    thread = threading.Thread(target=record, daemon=True)
    thread.start()
    thread.join(60)
    assert raised, "it waits without a limit"
    return raised[0]


def script_status() -> None:
    with Client() as client:
        client.status()


def stream() -> None:
    with closing(SocketTransport(may_start=True)) as transport:
        list(transport.events("/events", {}))


REQUESTS: dict[str, Callable[[], object]] = {
    "a request": lambda: connect(start=True).request("GET", "/status"),
    "a change": lambda: connect(start=True).request("POST", "/jobs/cancel", body={"ids": "all"}),
    "a long request": lambda: connect(start=True).request("POST", "/submissions", body={"a": "x" * 10_000_000}),
    "a request of a command that retries": lambda: RetryingClient().get("/status"),
    "a request of a script": script_status,
    "a stream": stream,
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_stopped_daemon_is_reported_with_its_pid_and_what_to_do_by(name: str, stopped: int) -> None:
    error = in_thread(REQUESTS[name])
    assert isinstance(error, SilentDaemon)
    assert str(error) == f"the daemon (pid {stopped}) is stopped and does not answer"
    assert f"`kill -CONT {stopped}`" in str(error.hint)


def test_a_daemon_that_accepts_no_more_connections_is_reported(stopped: int) -> None:
    waiting = []
    try:
        for _ in range(2000):  # as many as the kernel keeps for it
            waiting.append(socket.socket(socket.AF_UNIX))
            waiting[-1].settimeout(0)
            if waiting[-1].connect_ex(paths.socket_path()):
                break
        for act in (lambda: dial(paths.socket_path()), autostart.start_daemon):
            assert isinstance(in_thread(act), SilentDaemon)
    finally:
        for each in waiting:
            each.close()


def test_a_daemon_that_goes_on_in_time_answers(stopped: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_http, "_CHECK_S", 60.0)
    with connect(start=True) as client:
        threading.Timer(0.3, os.kill, (stopped, signal.SIGCONT)).start()
        assert client.request("GET", "/")["pid"] == stopped


def test_a_busy_daemon_is_waited_for(own_home: Path, impatient: None) -> None:
    slow = answering(own_home, lambda _: threading.Event().wait(1.0) or True)
    with slow as connections, connect(start=False) as client:
        assert client.request("GET", "/status") == {"ok": True}
    assert len(connections) == 1


class answering:  # noqa: N801 - used as a function
    """A daemon in a thread: for each connection, `act` decides whether it is answered, or closed without an answer."""

    def __init__(self, home: Path, act: Callable[[int], bool]) -> None:
        home.mkdir(mode=0o700, exist_ok=True)
        self._act, self._listener = act, user_sockets.bind(str(home / "daemon.sock"))
        self._listener.listen(8)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.connections: list[int] = []

    def __enter__(self) -> list[int]:
        self._thread.start()
        return self.connections

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._thread.join(DEADLINE_S)
        self._listener.close()

    def stop(self) -> None:
        """Accept no further connections."""
        self._listener.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            with link:
                link.recv(1 << 16)
                self.connections.append(len(self.connections))
                if self._act(len(self.connections)):
                    version = f"{fast_http.VERSION_FIELD}: {__version__}\r\n"
                    link.sendall(f'HTTP/1.1 200 OK\r\n{version}Content-Length: 11\r\n\r\n{{"ok":true}}'.encode())


def test_a_daemon_that_still_accepts_connections_while_it_ends_has_ended_once(own_home: Path) -> None:
    with answering(own_home, lambda count: count > 3) as connections, connect(start=False) as client:
        answer = client.request("POST", "/submissions", body={}, is_repeatable=True)
    assert answer == {"ok": True}
    assert len(connections) == 4


def test_daemon_start_starts_a_daemon_if_the_one_that_it_reached_was_ending(home: Path) -> None:
    def end_at_the_request(count: int) -> bool:
        if count > 1:  # the first connection sees whether a daemon runs
            ending.stop()
        return False

    ending = answering(home, end_at_the_request)
    with ending:
        command = [sys.executable, "-m", "gpuyard", "daemon", "start"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"daemon started (pid {running_pid(paths.lock_path())})\n"


def test_a_daemon_that_closes_every_connection_is_reported_as_one(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_http, "_REPEAT_FOR_S", 0.2)
    ended = pytest.raises(EnvironmentFault, match=r"^the daemon ended before the request")
    with answering(own_home, lambda _: False), connect(start=False) as client, ended:
        client.request("GET", "/status")


def test_a_submission_survives_the_death_of_its_daemon(own_queue: QueueUnderTest) -> None:
    """Whenever the daemon dies, the command ends with status 0, and each submission is in the queue once."""
    command = [sys.executable, "-m", "gpuyard", "submit", "--gpus", "0", "--hold", "--", "true"]
    lock = paths.lock_path()
    ids = []
    for number in range(7):
        # Killed after its answer, there is none. Stopped, it has accepted or not, read or not, when it is killed.
        start = [sys.executable, "-m", "gpuyard", "daemon", "start"]
        subprocess.run(start, check=True, capture_output=True, timeout=DEADLINE_S)
        pid = running_pid(lock)
        assert pid is not None
        if number % 2:
            os.kill(pid, signal.SIGSTOP)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as submitting:
            threading.Event().wait(0.02 * number)
            os.kill(pid, signal.SIGKILL)
            output, problem = submitting.communicate(timeout=DEADLINE_S)
        assert (submitting.returncode, problem) == (0, "")
        ids.append(int(output))
    assert ids == list(range(1, 8))
    pid = running_pid(lock)
    if pid is not None:
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: running_pid(lock) is None)
    own_queue.start()
    assert own_queue.counts() == {"held": 7}


@pytest.mark.full
def test_every_command_reports_a_stopped_daemon(queue: QueueUnderTest) -> None:
    assert queue.daemon is not None
    job_id, pid = queue.submit("true", hold=True), queue.daemon.pid
    one = str(job_id)
    commands = [
        ["queue"], ["show", one], ["why", one], ["history", one], ["logs", one], ["logs", "-f", one],
        ["submit", "true"], ["cancel", one], ["hold", one], ["release", one], ["pause"], ["report"], ["estimates"],
        ["clean", "--older-than", "1d"], ["web"], ["daemon", "start"], ["daemon", "status"], ["daemon", "stop"],
        ["daemon", "restart"], ["export", "slurm", one],
    ]  # fmt: skip
    os.kill(pid, signal.SIGSTOP)
    try:
        running = [
            subprocess.Popen([sys.executable, "-m", "gpuyard", *each], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for each in commands
        ]
        ended = [each.communicate(timeout=DEADLINE_S) for each in running]
    finally:
        queue.kill9()  # else it would carry out the requests
    silent = f"gpuyard: the daemon (pid {pid}) is stopped and does not answer\n  `kill -CONT {pid}`"
    for command, process, (_, problem) in zip(commands, running, ended, strict=True):
        assert (command, process.returncode, silent in problem.decode()) == (command, 1, True), problem
