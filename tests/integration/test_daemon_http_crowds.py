"""Streams and many clients at the daemon's socket: none is dropped without need, and none starves the others."""

import asyncio
import contextlib
import errno
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuyard.daemon.server.connection import ConnectionLimits
from gpuyard.daemon.server.http_messages import Request, Response, ResponseStream, StreamClient
from tests.fakes.daemon import DEADLINE_S, served, wait_until
from tests.integration.web_fixture import receive_until

pytestmark = pytest.mark.usefixtures("unmeasured")

GET = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
LAST = b"GET /last HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def path(own_home: Path) -> Path:
    return own_home / "daemon.sock"


def streaming(begin: Callable[[StreamClient], None]) -> ResponseStream:
    def response(viewer: StreamClient) -> Callable[[], None]:
        begin(viewer)
        return lambda: None

    return ResponseStream(start=response)


def test_a_response_longer_than_the_unread_limit_reaches_a_viewer_that_reads(path: Path) -> None:
    long = b"x" * 3_000_000 + b"its end"
    response, limits = streaming(lambda viewer: viewer.send(long)), ConnectionLimits(unread_bytes=1000)
    with served(path, lambda _: response, limits) as daemon, daemon.dial() as viewer:
        viewer.sendall(GET)
        assert receive_until(viewer, b"its end").endswith(b"its end")


def test_a_viewer_that_was_behind_and_has_caught_up_stays(path: Path) -> None:
    def begin(viewer: StreamClient) -> None:
        viewer.send(b"x" * 3_000_000 + b"all that was")
        asyncio.get_running_loop().call_later(2.5, viewer.send, b"what comes later")

    limits = ConnectionLimits(unread_answer_s=1.0, unread_bytes=4_000_000)
    with served(path, lambda _: streaming(begin), limits) as daemon, daemon.dial() as viewer:
        viewer.sendall(GET)
        receive_until(viewer, b"all that was")
        assert receive_until(viewer, b"later") == b"what comes later"


def test_a_viewer_that_leaves_too_much_unread_is_dropped_at_once(path: Path) -> None:
    """Not only after the timeout for reading."""

    def begin(viewer: StreamClient) -> None:
        viewer.send(b"x" * 3_000_000)
        asyncio.get_running_loop().call_soon(viewer.send, b"one thing more")

    limits = ConnectionLimits(unread_answer_s=10 * DEADLINE_S, unread_bytes=1_000_000)
    with served(path, lambda _: streaming(begin), limits) as daemon, daemon.dial() as viewer:
        viewer.sendall(GET)
        wait_until(lambda: bool(viewer.recv(1, socket.MSG_PEEK)))
        wait_until(lambda: len(daemon.server.open) == 0)


def test_a_client_that_pipelines_many_requests_does_not_starve_others(path: Path) -> None:
    is_busy, has_come = threading.Event(), threading.Event()
    order: list[str] = []

    def handle(request: Request) -> Response:
        if not order:
            is_busy.set()
            has_come.wait(DEADLINE_S)
        order.append(request.path)
        return Response()

    with served(path, handle) as daemon, daemon.dial() as greedy, daemon.dial() as modest:
        greedy.sendall(GET * 1000)
        assert is_busy.wait(DEADLINE_S)
        modest.sendall(LAST)
        has_come.set()
        receive_until(modest, b"\r\n\r\n")
        assert order.index("/last") < 500


def test_clients_that_disconnect_while_being_refused_are_not_logged(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def vanished(_: object) -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr("asyncio.selector_events._SelectorSocketTransport.write_eof", vanished)
    with served(path, limits=ConnectionLimits(connections=1)) as daemon, daemon.dial():
        wait_until(lambda: len(daemon.server.open) == 1)
        with daemon.dial() as vanishing, contextlib.suppress(ConnectionResetError):
            receive_until(vanishing, b"nothing ends so")
    assert caplog.text == ""
