"""The web server of a real daemon: authentication, permissions, limits and hostile clients."""

import contextlib
import os
import signal
import socket
import struct
import subprocess
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest

from gpuyard.errors import UserError
from tests.integration.queue_fixture import DEADLINE_S, QueueUnderTest, until
from tests.integration.test_queue_users import ANNE, become
from tests.integration.web_fixture import WebPage, receive_until
from tests.unit.ledger import as_root, child, wait_for_message

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
EVENTS = "/v1/events?watch=/status"


def held_job(queue: QueueUnderTest, *arguments: str, **options: Any) -> int:
    return queue.submit("true", *arguments, hold=True, **options)


def test_without_the_token_only_the_page_and_its_files_are_served(web: WebPage) -> None:
    locked = web.ask("GET", "/?token=wrong")
    assert (locked.status, locked.headers["content-type"]) == (401, "text/html; charset=utf-8")
    assert b"gpuyard web" in locked.body
    assert b"script" not in locked.body

    for target in ("/", f"/?token={web.token}"):
        page = web.ask("GET", target)
        assert (page.status, page.headers["cache-control"], "set-cookie" in page.headers) == (200, "no-store", False)
    page = web.get("/")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"/static/" in page.body
    user = web.queue.get("/jobs/1")["user"] if web.queue.submit("true") else ""
    assert web.get("/v1/session").json == {"read_only": False, "user": user, "host": socket.gethostname()}
    for target in ("/v1/status", "/v1/session", "/metrics", "/openapi.json", EVENTS, "/nothing"):
        refused = web.ask("GET", target)
        assert (refused.status, refused.json["error"]) == (401, "this page needs its token")


def test_a_script_authenticates_with_a_bearer_token(web: WebPage) -> None:
    assert web.ask("GET", "/v1/status", **web.bearer).json["pid"] == web.queue.get("/status")["pid"]
    answer = web.ask("POST", "/v1/submissions", '{"command": ["true"]}', **web.bearer, Content_Type="application/json")
    assert web.queue.wait(answer.json["ids"])["done"]
    assert web.ask("GET", f"/v1/status?token={web.token}").status == 401


@pytest.mark.usefixtures("unmeasured")
def test_a_forwarded_page_has_the_browsers_port(web: WebPage) -> None:
    forwarded = {"Host": "localhost:9001", **web.bearer}
    assert web.ask("GET", "/v1/status", **forwarded).status == 200
    change = {"Origin": "http://localhost:9001", "Content-Type": "application/json"}
    assert web.ask("POST", "/v1/pause", "{}", **forwarded, **change).status == 200


def test_the_page_cannot_stop_the_daemon_read_the_token_or_open_another_page(web: WebPage) -> None:
    for target in ("/v1/stop", "/v1/web", "/v1/web/stop", "/v1/%77eb", "/v1/web?x"):
        assert web.post(target).status == 403
        assert web.get(target).status == 403
    assert web.get("/v1/events?watch=/web").status == 403
    assert web.get("/v1/events?watch=/status%20/%2577eb").status == 403
    assert web.queue.get("/web")["url"] == web.url


def test_every_answer_has_security_headers_and_none_allows_other_origins(web: WebPage) -> None:
    with web.dial() as connection:
        connection.sendall(web.head("GET", EVENTS))
        stream = receive_until(connection, b"\r\n\r\n").lower()
    for name, value in HEADERS.items():
        assert f"\r\n{name}: {value}\r\n".lower().encode() in stream
    answers = [
        web.get("/"),
        web.get("/static/index.html"),
        web.get("/v1/status"),
        web.get("/v1/jobs/999"),
        web.get("/v1/jobs?state=strange"),
        web.ask("HEAD", "/v1/status", **web.bearer),
        web.ask("OPTIONS", "/v1/status", Origin="http://evil.example"),
        web.ask("GET", "/", Host="evil.example"),
        web.ask("GET", "/v1/status"),
        web.ask("POST", "/v1/submissions", Content_Length=str(2**30)),
        web.ask("GET", "/", Transfer_Encoding="chunked"),
    ]
    assert [each.status for each in answers] == [200, 200, 200, 404, 400, 200, 405, 403, 401, 413, 401]
    for answer in answers:
        assert HEADERS.items() <= answer.headers.items()
        assert not [name for name in answer.headers if name.startswith("access-control")]
    assert {answer.headers["cache-control"] for answer in (answers[0], *answers[2:])} == {"no-store"}


def test_only_files_of_the_page_are_served(web: WebPage) -> None:
    script = web.get("/static/dom.js")
    assert (script.status, script.headers["content-type"]) == (200, "text/javascript; charset=utf-8")
    again = web.get("/static/dom.js", If_None_Match=script.headers["etag"])
    assert (again.status, again.body) == (304, b"")
    token = b"web.token"
    for name in (
        "../web.token",
        "..%2fweb.token",
        "%2e%2e/%2e%2e/cli/web.py",
        "....//cli/web.py",
        "/etc/passwd",
        "%2fetc%2fpasswd",
        "..\\cli\\web.py",
        "dom.js%00.html",
        "./dom.js",
        "",
        "__pycache__",
    ):
        refused = web.get(f"/static/{name}")
        assert (refused.status, token in refused.body) == (404, "web.token" in name), name


def test_a_read_only_page_shows_jobs_and_changes_nothing(queue: QueueUnderTest) -> None:
    job = held_job(queue, environment={"PATH": "/bin", "SECRET": "hidden-value"})
    web = WebPage(queue, read_only=True)
    assert web.get("/v1/session").json["read_only"] is True
    assert web.get("/v1/jobs").json["jobs"][0]["id"] == job
    shown = web.get(f"/v1/jobs/{job}")
    assert ("SECRET" in shown.json["environment_names"], b"hidden-value" in shown.body) == (True, False)
    assert web.get(f"/v1/jobs/{job}?environment=1").status == 403
    assert web.get(f"/v1/events?watch=/jobs/{job}?environment=1").status == 403
    assert web.post("/v1/jobs/cancel", {"ids": "all"}).status == 403
    assert web.post("/v1/submissions", {"command": ["true"]}, **web.bearer).status == 403
    assert queue.counts() == {"held": 1}
    assert b"hidden-value" in WebPage(queue, read_only=False).get(f"/v1/jobs/{job}?environment=1").body


def test_the_session_is_of_the_page_alone(web: WebPage) -> None:
    with pytest.raises(UserError, match="there is no GET /v1/session"):
        web.queue.get("/session")
    assert web.get("/v1/session").status == 200


# Limits


def test_the_size_of_a_body_is_limited_and_without_a_token_it_is_not_read(web: WebPage) -> None:
    with web.dial() as connection:
        connection.sendall(web.head("POST", "/v1/submissions", **web.from_page, Content_Length=str(9 * 2**20)))
        assert b" 413 " in receive_until(connection, b"\r\n\r\n")
    with web.dial() as connection:
        head = web.head("POST", "/v1/submissions", Authorization="", **web.from_page, Content_Length="1000000")
        connection.sendall(head + b"{")
        assert b" 401 " in receive_until(connection, b"\r\n\r\n")
    long = web.post("/v1/submissions", {"command": ["true", "x" * 100_000], "options": {"hold": True}})
    assert long.json["count"] == 1


def test_too_many_requests_get_429_with_retry_after(web: WebPage) -> None:
    with web.dial() as connection:
        connection.sendall(web.head("GET", "/v1/session") * 399 + web.head("GET", "/v1/session", Connection="close"))
        answers = receive_until(connection, b"no such text")
    served, refused = answers.count(b"HTTP/1.1 200 "), answers.count(b"HTTP/1.1 429 ")
    assert served + refused == 400
    assert served >= 200
    assert refused >= 1
    assert b"Retry-After: 1\r\n" in answers
    assert web.queue.get("/status")["pid"]
    until(lambda: web.get("/v1/status").status == 200, "the end of the wait")


def test_streams_and_connections_are_limited_and_a_disconnect_frees_a_slot(web: WebPage) -> None:
    with contextlib.ExitStack() as stack:
        viewers = []
        for _ in range(64):
            viewer = stack.enter_context(web.dial())
            viewers.append(viewer)
            viewer.sendall(web.head("GET", EVENTS))
            assert b"200 OK" in receive_until(viewer, b"\r\n\r\n")
        refused = web.get(EVENTS)
        assert (refused.status, refused.headers["retry-after"]) == (503, "5")
        assert web.get("/v1/status").status == 200
        idle = []
        for _ in range(64):
            each = stack.enter_context(web.dial())
            idle.append(each)
            each.sendall(web.head("GET", "/v1/session"))
            assert b"200 OK" in receive_until(each, b"}")
        assert web.get("/v1/session").status == 503
        assert web.queue.get("/status")["pid"]
        viewers[0].close()

        def has_free_slot() -> bool:
            for each in idle:
                each.close()
            with web.dial() as one:
                one.sendall(web.head("GET", EVENTS))
                return b"200 OK" in receive_until(one, b"\r\n\r\n")

        until(has_free_slot, "a free slot for a viewer")


@pytest.mark.usefixtures("unmeasured")
def test_unauthenticated_connections_do_not_exhaust_the_limit(web: WebPage) -> None:
    visit = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    asked = [
        ("/v1/status", {}),
        ("/", {}),
        ("/", visit),
        ("/?token=wrong", {}),
        ("/v1/status", {"Host": "evil.example"}),
    ]
    with contextlib.ExitStack() as stack:
        for target, headers in asked * 28:
            unauthenticated = stack.enter_context(web.dial())
            unauthenticated.sendall(web.head("GET", target, **{"Authorization": "", **headers}))
            receive_until(unauthenticated, b"no such text")  # the daemon closes the connection
        assert web.get("/v1/status").status == 200


# Over time


def test_a_new_token_invalidates_the_old_one_and_ends_open_streams(web: WebPage) -> None:
    with web.dial() as viewer:
        viewer.sendall(web.head("GET", EVENTS))
        receive_until(viewer, b"\n\n")
        fresh = WebPage(web.queue, port=web.port, new_token=True)
        receive_until(viewer, b"no such text")  # until the daemon closes it
    assert (fresh.port, fresh.token != web.token) == (web.port, True)
    assert web.get("/v1/status").status == 401
    assert web.ask("GET", "/v1/status", **web.bearer).status == 401
    assert fresh.get("/v1/status").status == 200


@pytest.mark.usefixtures("unmeasured")
def test_an_open_page_works_after_a_daemon_restart(web: WebPage) -> None:
    web.queue.restart()
    again = WebPage(web.queue, port=web.port)
    assert again.url == web.url
    assert web.get("/v1/status").status == 200
    assert web.post("/v1/pause").status == 200


# Other users of the machine


@pytest.mark.needs("curl")
@as_root
def test_another_user_is_refused_on_every_address_of_the_machine(web: WebPage) -> None:
    local_addresses = (each for addresses in psutil.net_if_addrs().values() for each in addresses)
    others = [
        each.address
        for each in local_addresses
        if each.family is socket.AF_INET and not each.address.startswith("127.")
    ]
    for address in [*others, "127.0.0.2"]:
        command = [
            "curl",
            "--silent",
            "--include",
            "--interface",
            address,
            "--header",
            f"Authorization: {web.bearer['Authorization']}",
        ]
        command.append(f"http://127.0.0.1:{web.port}/v1/status")
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True, user=ANNE)
        assert ("another user" in done.stdout, " 403 " in done.stdout) == (True, True), address


def cancel_and_vanish(connection: Connection, port: int, request: bytes, is_abrupt: bool) -> None:
    become(ANNE)
    with socket.socket() as one:
        if is_abrupt:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.connect(("127.0.0.1", port))
        one.sendall(request)
    connection.send("gone")
    wait_for_message(connection)


@as_root
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("is_abrupt", [True, False])
def test_a_request_of_another_user_who_disconnects_early_is_refused(web: WebPage, is_abrupt: bool) -> None:
    job, daemon = held_job(web.queue), web.queue.daemon
    assert daemon is not None
    body = f'{{"ids": "{job}"}}'
    request = web.head("POST", "/v1/jobs/cancel", **web.from_page, Content_Length=str(len(body))) + body.encode()
    os.kill(daemon.pid, signal.SIGSTOP)  # the daemon reads the request after the client disconnected
    try:
        with child(cancel_and_vanish, web.port, request, is_abrupt) as one:
            assert one.receive() == "gone"
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    for _ in range(3):
        assert web.get("/v1/status").status == 200
    assert web.queue.state(job) == "held"
