"""The web page of a queue, requested as a browser, a script or an attacker would."""

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.integration.queue_fixture import DEADLINE_S, QueueUnderTest


class PageResponse(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class WebPage:
    """The address of the page, and its credentials."""

    def __init__(self, queue: QueueUnderTest, **settings: object) -> None:
        self.queue = queue
        self.answer = queue.post("/web", **{"port": 0, **settings})
        self.url: str = self.answer["url"]
        self.token = self.url.partition("token=")[2]
        self.port: int = self.answer["port"]
        self.host = f"127.0.0.1:{self.port}"
        self.bearer = {"Authorization": f"Bearer {self.token}"}
        self.from_page = {"Origin": f"http://{self.host}", "Content-Type": "application/json"}

    def ask(self, method: str, target: str, body: str | None = None, **headers: str) -> PageResponse:
        """Send one request on a new connection. Underscores in header names become dashes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        with contextlib.closing(connection):
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, target, body, {"Host": self.host, **named})
            answer = connection.getresponse()
            lower = {name.lower(): value for name, value in answer.getheaders()}
            return PageResponse(answer.status, lower, answer.read())

    def get(self, target: str, **headers: str) -> PageResponse:
        return self.ask("GET", target, **{**self.bearer, **headers})

    def post(self, target: str, body: object = None, **headers: str) -> PageResponse:
        return self.ask("POST", target, json.dumps(body or {}), **{**self.bearer, **self.from_page, **headers})

    @contextlib.contextmanager
    def dial(self, receive_bytes: int | None = None) -> Iterator[socket.socket]:
        with socket.socket() as connection:
            if receive_bytes is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            connection.settimeout(DEADLINE_S)
            connection.connect(("127.0.0.1", self.port))
            yield connection

    def head(self, method: str, target: str, **headers: str) -> bytes:
        """Return the head of a request with the token."""
        named = {"Host": self.host, **self.bearer, **headers}
        fields = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in named.items())
        return f"{method} {target} HTTP/1.1\r\n{fields}\r\n".encode()


def receive_until(connection: socket.socket, part: bytes) -> bytes:
    """Receive up to and including `part`, or until the other end closes."""
    received = b""
    while part not in received and (data := connection.recv(65536)):
        received += data
    return received


@pytest.fixture
def web(queue: QueueUnderTest) -> WebPage:
    return WebPage(queue)
