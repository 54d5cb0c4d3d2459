"""The daemon's socket serves its owner, even beside clients that send garbage, stay silent or do not read."""

import asyncio
import logging
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuyard.daemon.server.connection import ConnectionLimits
from gpuyard.daemon.server.http_messages import HttpError, Request, Response
from gpuyard.errors import EnvironmentFault, UserError
from tests.fakes.daemon import DEADLINE_S, Served, body_of, echo, receive_all, served, status_of, wait_until
from tests.in_time import in_time

pytestmark = pytest.mark.usefixtures("unmeasured")

GET = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
LAST = b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
OTHER_UID = 65534


@pytest.fixture
def path(own_home: Path) -> Path:
    return own_home / "daemon.sock"


@pytest.fixture
def daemon(path: Path) -> Iterator[Served]:
    with served(path) as running:
        yield running


def curl(path: Path, *arguments: str, user: int | None = None) -> "subprocess.CompletedProcess[str]":
    command = ["curl", "--silent", "--show-error", "--unix-socket", str(path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, user=user)


@pytest.mark.needs("curl")
def test_a_long_body_that_curl_sends_after_100_continue_is_read(daemon: Served, tmp_path: Path) -> None:
    long = tmp_path / "long"
    long.write_bytes(b"x" * 3_000_000)
    done = curl(daemon.path, "-v", "-H", "Expect: 100-continue", "--data-binary", f"@{long}", "http://x/jobs")
    assert "100 Continue" in done.stderr
    assert f'"body":"{"x" * 3_000_000}"' in done.stdout


def test_pipelined_requests_are_answered_in_order(path: Path) -> None:
    async def later(request: Request) -> Response:
        await asyncio.sleep(0.01)
        return echo(request)

    def handle(request: Request) -> "Response | asyncio.Future[Response]":
        return asyncio.ensure_future(later(request)) if request.path == "/slow" else echo(request)

    with served(path, handle) as daemon:
        answers = daemon.exchange(GET + b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n" + GET * 1000 + LAST)
    asked = [part.partition(b'"')[0] for part in answers.split(b'"path":"')[1:]]
    assert asked == [b"/a", b"/slow", *[b"/a"] * 1000, b"/last"]


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"hello\r\n\r\n",
    ],
)
def test_garbage_is_refused_and_the_next_client_is_served(daemon: Served, garbage: bytes) -> None:
    answer = daemon.exchange(garbage)
    assert status_of(answer) == 400
    assert body_of(answer)["error"]
    assert status_of(daemon.exchange(LAST)) == 200


@pytest.mark.parametrize(
    ("oversized", "status"),
    [
        (b"GET /" + b"x" * 70000, 413),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 67108865\r\n\r\n" + b"x" * 5_000_000, 413),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", 400),
        (CHUNKED + b"4000001\r\n" + b"x" * 67_108_865, 413),
    ],
)
def test_a_head_or_body_that_is_too_long_is_refused(daemon: Served, oversized: bytes, status: int) -> None:
    answer = daemon.exchange(oversized)
    assert status_of(answer) == status
    assert body_of(answer)["error"]


def test_an_incomplete_request_times_out(path: Path) -> None:
    with served(path, limits=ConnectionLimits(half_request_s=0.1)) as daemon:
        for half in (b"G", GET[:-2], b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nfour", GET + b"GET /b"):
            last = daemon.exchange(half).rpartition(b"HTTP/1.1 ")[2]
            assert last.startswith(b"408 ")
            assert body_of(last)["error"] == "the rest of the request did not arrive in time"


def test_silent_clients_do_not_block_others(daemon: Served) -> None:
    silent = [daemon.dial() for _ in range(200)]
    wait_until(lambda: len(daemon.server.open) == 200)
    assert status_of(in_time(1.0, lambda: daemon.exchange(LAST))) == 200
    assert len(daemon.server.open) >= 200, "it was answered while all of them were there"
    for connection in silent:
        connection.close()


def test_silent_clients_are_dropped_after_a_timeout(path: Path) -> None:
    with served(path, limits=ConnectionLimits(silent_s=0.1)) as daemon:
        silent = [daemon.dial() for _ in range(10)]
        for connection in silent:
            assert receive_all(connection) == b""
            connection.close()


def test_an_idle_connection_that_has_sent_a_request_is_kept_longer_than_a_silent_one(path: Path) -> None:
    with served(path, limits=ConnectionLimits(silent_s=2.0, half_request_s=2.0)) as daemon, daemon.dial() as connection:
        connection.sendall(GET)
        assert status_of(connection.recv(65536)) == 200
        with daemon.dial() as silent:
            assert receive_all(silent) == b""
        connection.sendall(GET)
        assert status_of(connection.recv(65536)) == 200


def test_a_client_beyond_the_limit_is_refused(path: Path) -> None:
    with served(path, limits=ConnectionLimits(connections=2)) as daemon:
        first, second = daemon.dial(), daemon.dial()
        answer = daemon.exchange(LAST)
        assert status_of(answer) == 503
        assert "which is its limit" in str(body_of(answer)["error"])
        first.close()
        wait_until(lambda: len(daemon.server.open) == 1)
        assert status_of(daemon.exchange(LAST)) == 200
        second.close()


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (UserError("there is no such thing", hint="try another"), 400, "there is no such thing"),
        (EnvironmentFault("the disk is full"), 503, "the disk is full"),
        (HttpError(404, "there is no job 17"), 404, "there is no job 17"),
        (EnvironmentFault("b\udcffd"), 503, "b?d"),
    ],
)
@pytest.mark.parametrize("is_awaited", [False, True])
def test_an_error_raised_by_a_handler_becomes_the_response(
    path: Path, error: Exception, status: int, message: str, is_awaited: bool
) -> None:
    async def fail() -> Response:
        raise error

    def handle(request: Request) -> Response:
        raise error

    with served(path, (lambda _: fail()) if is_awaited else handle) as daemon:
        answer = daemon.exchange(LAST)
    assert (status_of(answer), body_of(answer)["error"]) == (status, message)


@pytest.mark.parametrize("is_awaited", [False, True])
def test_a_bug_in_a_handler_is_answered_and_logged_and_the_daemon_continues(
    path: Path, caplog: pytest.LogCaptureFixture, is_awaited: bool
) -> None:
    async def fail() -> Response:
        return Response(body=b"%d" % (1 // 0))

    def handle(request: Request) -> "Response | asyncio.Future[Response]":
        if request.path == "/last":
            return Response()
        return asyncio.ensure_future(fail()) if is_awaited else Response(body=b"%d" % (1 // 0))

    with caplog.at_level(logging.ERROR), served(path, handle) as daemon:
        answers = daemon.exchange(GET + LAST)
    assert status_of(answers) == 500
    assert b"ZeroDivisionError" in answers
    assert b"HTTP/1.1 200 OK" in answers
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("leaves_unread", [False, True], ids=["closes", "resets"])
def test_the_handler_of_a_client_that_goes_away_is_cancelled(path: Path, leaves_unread: bool) -> None:
    """The connection of a client that leaves a response unread is reset, which differs from an end of file."""
    started, cancelled = threading.Event(), threading.Event()

    async def wait_for_ever(request: Request) -> Response:
        if request.path == "/unread":
            return Response()
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return Response()

    with served(path, wait_for_ever) as daemon:
        with daemon.dial() as connection:
            connection.sendall(GET.replace(b"/a", b"/unread") * leaves_unread + GET)
            assert started.wait(DEADLINE_S)
            assert not cancelled.is_set()
        assert cancelled.wait(DEADLINE_S)
        wait_until(lambda: len(daemon.server.open) == 0)


def test_a_client_that_does_not_read_is_dropped(path: Path) -> None:
    def handle(request: Request) -> Response:
        return echo(request) if request.path == "/last" else Response(body=b"x" * 8_000_000)

    with served(path, handle, ConnectionLimits(unread_answer_s=0.1)) as daemon, daemon.dial() as connection:
        wait_until(lambda: len(daemon.server.open) == 1)
        connection.sendall(GET * 100)
        assert status_of(daemon.exchange(LAST)) == 200
        wait_until(lambda: len(daemon.server.open) == 0)
        assert len(receive_all(connection)) < 8_000_000


def test_a_client_that_reads_late_gets_the_whole_response(path: Path) -> None:
    with served(path, lambda _: Response(body=b"x" * 1_000_000)) as daemon:
        assert daemon.exchange(GET * 30 + LAST).count(b"x" * 1_000_000) == 31


def test_closing_cancels_pending_handlers_and_removes_the_socket(path: Path) -> None:
    started = threading.Event()

    async def wait_for_ever(request: Request) -> Response:
        started.set()
        return await asyncio.Future()

    with served(path, wait_for_ever) as daemon:
        with daemon.dial() as busy, daemon.dial() as idle:
            busy.sendall(GET)
            assert started.wait(DEADLINE_S)
            daemon.call(daemon.server.close)
            assert receive_all(busy) + receive_all(idle) == b""
        assert not path.exists()
        with pytest.raises(FileNotFoundError):
            daemon.dial()


def test_head_and_http_1_0_are_answered_correctly(daemon: Served) -> None:
    head = daemon.exchange(b"HEAD /a HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert head.endswith(b"\r\n\r\n")
    assert body_of(daemon.exchange(b"GET /old HTTP/1.0\r\n\r\n"))["path"] == "/old"


def test_fifty_processes_at_once_are_all_served(daemon: Served) -> None:
    script = (
        "import sys\nfrom gpuyard.client.fast_http import connect\n"
        "client = connect(start=False)\nsys.stdin.readline()\n"
        "print(*[client.request('POST', '/jobs', body=[sys.argv[1], n])['body'] for n in range(20)])\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(n)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for n in range(50)
    ]
    wait_until(lambda: len(daemon.server.open) == 50)
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=DEADLINE_S)[0].strip() for process in processes]
    assert outputs == [" ".join(f'["{n}",{m}]' for m in range(20)) for n in range(50)]


def test_only_the_owner_can_use_the_socket_under_any_umask(path: Path) -> None:
    umask = os.umask(0)
    try:
        with served(path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert os.umask(0) == 0
    finally:
        os.umask(umask)


@pytest.mark.needs("curl")
def test_another_user_is_not_served() -> None:
    """As root we can become another user; otherwise the test of the file mode above has to do."""
    if os.getuid() != 0:
        return
    folder = Path(tempfile.mkdtemp(prefix="gpuyard-http-"))
    try:
        folder.chmod(0o755)
        with served(folder / "daemon.sock") as daemon:
            assert curl(daemon.path, "http://x/", user=OTHER_UID).returncode != 0
            daemon.path.chmod(0o666)
            assert "another user" in curl(daemon.path, "http://x/", user=OTHER_UID).stdout
            assert '"path":"/"' in curl(daemon.path, "http://x/").stdout
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("length", [99, 100, 101, 107, 108, 109, 250])
def test_a_socket_path_may_be_longer_than_an_address(length: int) -> None:
    if length > 100 and sys.platform != "linux":
        return
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / ("d" * (length - len(home) - len("//daemon.sock"))) / "daemon.sock"
        assert len(str(path)) == length
        with served(path) as daemon:
            assert status_of(daemon.exchange(LAST)) == 200


def test_the_socket_of_a_dead_daemon_is_replaced(path: Path) -> None:
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with served(path) as daemon:
        assert status_of(daemon.exchange(LAST)) == 200


def _put_file(path: Path) -> None:
    path.write_text("precious")


def _let_others_in(path: Path) -> None:
    path.parent.chmod(0o777)


@pytest.mark.parametrize(
    ("spoil", "message"), [(_put_file, "is not a socket"), (_let_others_in, "other users can write")]
)
def test_a_path_occupied_by_another_file_is_refused(path: Path, spoil: Callable[[Path], None], message: str) -> None:
    path.parent.mkdir()
    spoil(path)
    with pytest.raises(EnvironmentFault, match=message), served(path):
        pass
