"""`gpuyard web` and `[web]`: the page is served at the printed address, and the daemon starts even if it cannot be."""

import contextlib
import json
import os
import socket
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuyard.config import parse_config
from gpuyard.errors import UserError
from tests.fakes.queue_command import run
from tests.integration.queue_fixture import QueueUnderTest
from tests.integration.web_fixture import WebPage


def opened(*arguments: str) -> Any:
    done = run("web", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def is_served(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def taken(port: int) -> Iterator[int]:
    """Occupy a port."""
    with socket.socket() as other:
        with contextlib.suppress(OSError):
            other.bind(("127.0.0.1", port))
        with contextlib.suppress(OSError):
            other.listen()
        yield other.getsockname()[1] or port


def test_it_prints_the_address_of_the_page_and_the_same_one_again(queue: QueueUnderTest) -> None:
    first = run("web", "--port", "0")
    url = first.stdout.strip()
    port = int(url.split(":")[2].partition("/")[0])
    assert url.startswith(f"http://127.0.0.1:{port}/?token=")
    assert f"ssh -L {port}:127.0.0.1:{port} " in first.stderr
    assert run("web").stdout.strip() == url
    assert queue.get("/web")["url"] == url
    assert stat.S_IMODE((queue.home / "web.token").stat().st_mode) == 0o600

    looking = opened("--read-only")
    assert (looking["url"], looking["read_only"]) == (url, True)
    assert opened()["read_only"] is True
    fresh = opened("--new-token")
    assert (fresh["port"], fresh["url"] == url, fresh["read_only"]) == (port, False, True)

    assert run("web", "--stop").stdout == "the page is closed\n"
    assert not is_served(port)
    assert run("web", "--stop").stdout == "no page is open\n"
    assert json.loads(run("web", "--stop", "--json").stdout) == {"stopped": False}
    assert opened("--port", str(port))["url"] == fresh["url"]
    queue.stop()
    assert not is_served(port)
    queue.start()


def test_a_taken_default_port_is_replaced_by_the_next_and_a_taken_named_port_is_an_error(queue: QueueUnderTest) -> None:
    with taken(8765):
        answer = opened()
        assert 8765 < answer["port"] < 8785
        assert answer["notes"] == [f"port 8765 is in use; the page is on port {answer['port']}"]
    with taken(0) as port:
        refused = run("web", "--port", str(port))
        assert (refused.returncode, f":{port}: Address already in use" in refused.stderr) == (1, True)
    assert is_served(answer["port"]), "the open page is still served"
    moved = opened("--port", "0")
    assert moved["port"] != answer["port"]
    assert not is_served(answer["port"])
    for port_ in ("70000", "x", "-1"):
        assert run("web", "--port", port_).returncode == 2
    for address in ("no-such-name.invalid", "192.0.2.1"):
        unknown = run("web", "--address", address)
        assert (unknown.returncode, "is not an address of this machine" in unknown.stderr) == (2, True)


def test_another_address_prints_a_warning_and_needs_the_token_too(queue: QueueUnderTest) -> None:
    result = run("web", "--address", "0.0.0.0", "--port", "0")
    assert "not encrypted" in result.stderr
    assert result.stdout.startswith(f"http://{socket.gethostname()}:")
    web = WebPage(queue, address="0.0.0.0")
    assert web.answer["url"] == result.stdout.strip()
    assert web.ask("GET", "/v1/status").status == 401
    assert web.ask("GET", "/v1/status", Host=f"evil.example:{web.port}", **web.bearer).status == 403
    for host in (f"{socket.gethostname()}:{web.port}", f"10.1.2.3:{web.port}", f"localhost:{web.port}"):
        assert web.ask("GET", "/v1/status", Host=host, **web.bearer).status == 200


def test_a_token_file_readable_by_others_is_replaced(queue: QueueUnderTest) -> None:
    before = opened("--port", "0")["url"]
    run("web", "--stop")
    os.chmod(queue.home / "web.token", 0o644)
    with pytest.raises(UserError, match="port: Expected `int"):
        queue.post("/web", port="x")
    assert opened("--port", "0")["url"].partition("token=")[2] != before.partition("token=")[2]


def test_the_configuration_opens_the_page_at_the_daemons_start(own_queue: QueueUnderTest) -> None:
    own_queue.home.mkdir(parents=True)
    (own_queue.home / "config.toml").write_text("web = true\n")
    own_queue.start()
    port = own_queue.get("/web")["port"]
    assert port >= 8765
    assert "the web page is at 127.0.0.1" in own_queue.daemon.log if own_queue.daemon else False
    (own_queue.home / "config.toml").write_text("[web]\nenabled = false\nport = 0\nread_only = true\n")
    own_queue.restart()
    assert own_queue.get("/web")["url"] is None
    answer = opened()
    assert (answer["read_only"], answer["port"] not in (0, 8765)) == (True, True)


def test_the_daemon_starts_though_the_page_cannot_be_opened(own_queue: QueueUnderTest) -> None:
    own_queue.home.mkdir(parents=True)
    with taken(0) as port:
        (own_queue.home / "config.toml").write_text(f"[web]\nport = {port}\n")
        own_queue.start()
        (notice,) = own_queue.get("/status")["notices"]
        assert f"the web page is not open: the web page cannot be served at 127.0.0.1:{port}" in notice
        assert own_queue.daemon is not None
        assert notice in own_queue.daemon.log
        assert own_queue.wait(own_queue.submit("true"))["done"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("web = 3", "web takes true or false or a table of keys, not a whole number"),
        ("[web]\nport = 70000", "[web] port takes a whole number <= 65535"),
        ("[web]\nadress = 'x'", "did you mean address?"),
    ],
)
def test_an_error_in_the_configuration_is_named(text: str, complaint: str) -> None:
    with pytest.raises(UserError) as raised:
        parse_config(tomllib.loads(text), Path("config.toml"))
    assert complaint in str(raised.value)
