"""Attacks on another user's web page. A stranger on another machine is played by clients of another loopback address,
without the token: of the clients on this machine, the daemon accepts only those of its own user."""

import contextlib
import hashlib
import hmac
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.catalogue import attack
from tests.hostile.users import BEN, act_as
from tests.integration.queue_fixture import DEADLINE_S, QueueUnderTest, until
from tests.integration.web_fixture import WebPage, receive_until

STRANGERS = 300


@pytest.fixture
def page(queue: QueueUnderTest) -> WebPage:
    """The page, for all machines of the network."""
    return WebPage(queue, address="0.0.0.0")


def dial(port: int, source: str = "127.0.0.2") -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), DEADLINE_S, source_address=(source, 0))


@contextlib.contextmanager
def crowd(page: WebPage, sent: bytes = b"", sources: int = 1) -> Iterator[list[socket.socket]]:
    """Connect STRANGERS times from so many addresses, send the same on all connections, and keep them open."""
    with contextlib.ExitStack() as stack:
        clients = []
        for number in range(STRANGERS):
            client = stack.enter_context(dial(page.port, f"127.0.1.{1 + number % sources}"))
            with contextlib.suppress(ConnectionError):  # it was dropped
                client.sendall(sent)
            clients.append(client)
        yield clients


@attack(
    "open 300 connections to the page, and send nothing",
    now="harmless: clients without the token have 32 connections of their own, for 5 s",
)
def test_idle_connections(page: WebPage) -> None:
    with crowd(page):
        assert page.get("/v1/status").status == 200
        assert page.ask("GET", f"/?token={page.token}").status == 200


@attack(
    "the same from 250 addresses",
    now="harmless: the oldest connection goes first",
)
def test_idle_connections_of_many_addresses(page: WebPage) -> None:
    with crowd(page, sources=250):
        assert page.get("/v1/status").status == 200


@attack(
    "send half a request on 300 connections, and then nothing",
    now="harmless",
)
def test_half_requests(page: WebPage) -> None:
    with crowd(page, b"GET /v1/status HTTP/1.1\r\nHost: "):
        assert page.get("/v1/status").status == 200


@attack(
    "send the head of a request byte by byte, for as long as it lasts",
    now="bounded: 5 s from connecting to the end of the head",
)
@pytest.mark.full
def test_a_head_byte_by_byte(page: WebPage) -> None:
    stop = threading.Event()
    with dial(page.port) as client:

        def trickle() -> None:
            with contextlib.suppress(OSError):
                client.sendall(b"GET / HTTP/1.1\r\nX: ")
                while not stop.wait(0.2):
                    client.sendall(b"x")

        sender = threading.Thread(target=trickle)
        sender.start()
        try:
            client.settimeout(20)  # before, it took 30 s
            assert client.recv(1) == b"", "it is disconnected"
        finally:
            stop.set()
            sender.join()


@attack(
    "send a body of 8 MiB with a request for the public page",
    now="refused: a body is not read without the token",
)
def test_a_body_without_a_token(page: WebPage) -> None:
    with dial(page.port) as client:
        head = f"GET / HTTP/1.1\r\nHost: {page.host}\r\nContent-Length: {8 << 20}\r\n\r\n"
        client.sendall(head.encode() + b"x" * 1000)
        assert b" 401 " in receive_until(client, b"\r\n\r\n")


@attack("send a head of 100 kB", now="refused")
def test_a_large_head(page: WebPage) -> None:
    with dial(page.port) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000)
        assert b" 413 " in receive_until(client, b"\r\n\r\n")


@attack("try 100 wrong tokens", now="harmless: only wrong tokens are limited")
def test_wrong_tokens(page: WebPage) -> None:
    answers = [page.ask("GET", "/v1/status", Authorization=f"Bearer {number}").status for number in range(100)]
    assert (set(answers), answers.count(401) < 20) == ({401, 429}, True)
    assert page.get("/v1/status").status == 200
    assert page.ask("GET", "/v1/status", **page.bearer).status == 200


@attack("watch the queue as an event stream without the token", now="refused")
def test_a_stream_without_a_token(page: WebPage) -> None:
    assert page.ask("GET", "/v1/events?watch=/status").status == 401
    assert page.queue.get("/status")["viewers"] == 0


@attack(
    "with a name server, make the victim's browser take the page for one of the attacker's site",
    now="refused: the page answers to its own names only",
)
def test_dns_rebinding(page: WebPage) -> None:
    assert page.get("/v1/status", Host="evil.example").status == 403
    assert page.post("/v1/pause", Host=f"evil.example:{page.port}").status == 403


@attack("stop the daemon, or open another page, with the token", now="refused")
def test_stop_through_the_page(page: WebPage) -> None:
    assert page.post("/v1/stop").status == 403
    assert page.post("/v1/web", {"address": "0.0.0.0"}).status == 403
    assert page.get("/v1/web").status == 403


def knock(port: int) -> list[bytes]:
    """Connect as another user of this machine; return what the daemon answers to the first five."""
    answers = []
    with contextlib.ExitStack() as stack:
        for number in range(STRANGERS):
            client = stack.enter_context(socket.socket())
            client.connect(("127.0.0.1", port))
            if number < 5:
                answers.append(receive_until(client, b"}"))
    return answers


@attack("connect to the page 300 times as another user of the machine", now="refused")
def test_connections_of_another_user(page: WebPage) -> None:
    answers = act_as(BEN, knock, page.port)
    assert all(b"another user" in answer for answer in answers)
    until(lambda: page.get("/v1/status").status == 200, "an answer for the owner")


def read(path: str) -> bytes:
    return Path(path).read_bytes()


@attack("read the token of the page, the queue, and the daemon's log", now="refused")
def test_read_the_token(own_home: Path, page: WebPage) -> None:
    page.queue.submit("true")
    for name in ("web.token", "queue.db", "journal"):
        assert (own_home / name).exists()
        with pytest.raises(PermissionError):
            act_as(BEN, read, str(own_home / name))
        assert os.stat(own_home / name).st_mode & 0o077 == 0


@attack(
    "serve another port of the host that the victim opens the page on, and use the cookie that the browser sends there",
    now="refused: there is no cookie; the token stays in the tab",
)
def test_cookie_from_another_port(page: WebPage) -> None:
    entered = page.ask("GET", f"/?token={page.token}")
    assert (entered.status, entered.headers.get("set-cookie")) == (200, None)
    own = hmac.new(page.token.encode(), b"the page of gpuyard", hashlib.sha256).hexdigest()
    for value in (own, page.token):
        stolen = {"Cookie": f"gpuyard-{page.port}={value}", **page.from_page}
        assert page.ask("POST", "/v1/submissions", '{"command": ["true"]}', **stolen).status == 401
        assert page.ask("GET", "/v1/jobs", **stolen).status == 401
    assert page.queue.counts() == {}


@attack(
    "read the values of `--container-option=--env=KEY=VALUE` on a read-only page",
    now="refused: only the names are shown",
)
def test_values_in_container_options(
    own_queue: QueueUnderTest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "podman").write_text("#!/bin/sh\n")
    (tmp_path / "podman").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    own_queue.start()
    options = ["--env=KEY=hidden-value", "--env", "OTHER=hidden-value"]
    job = own_queue.submit("true", hold=True, image="image", gpus=0, **{"container-option": options})
    web = WebPage(own_queue, read_only=True)
    for target in (f"/v1/jobs/{job}", "/v1/jobs", f"/v1/jobs/{job}/history", "/v1/export", f"/v1/jobs/{job}/why"):
        assert b"hidden-value" not in web.get(target).body, target
    assert web.get(f"/v1/jobs/{job}").json["container"]["options"] == ["--env=KEY=…", "--env", "OTHER=…"]
