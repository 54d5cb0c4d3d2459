"""The two transports of `gpuyard.Client`: the daemon's own socket, and the web page's port with its token.

Over the socket, a daemon is started if none runs, and a wait continues with the next daemon. The page's port may be
forwarded from another machine: nothing is started, and no file of this machine is visible there. Threads may share a
transport (requests take turns, long ones have a connection of their own), and so may a process and its forks. Notices
about a daemon of another version are warnings of the logger `gpuyard`."""

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from gpuyard.client import fast_http, paths
from gpuyard.client.daemon_liveness import await_end, silent
from gpuyard.client.retrying import RetryingClient
from gpuyard.errors import EnvironmentFault, GpuyardError, UserError
from gpuyard.system import user_sockets
from gpuyard.version import __version__

Query = dict[str, str]
Answer = dict[str, Any]

_ANSWER_S = 60.0  # also the longest silence of a stream, into which the daemon sends a heartbeat every 15 s
_log = logging.getLogger("gpuyard")


class _Turns:
    """A lock that one thread holds at a time. A forked process drops its parent's connection first."""

    def __init__(self, drop: Callable[[], None]) -> None:
        self._drop, self._pid, self._lock = drop, os.getpid(), threading.Lock()

    def __enter__(self) -> None:
        if self._pid != os.getpid():
            self._pid, self._lock = os.getpid(), threading.Lock()  # a thread of the parent may have held it
            self._drop()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class SocketTransport:
    is_local = True  # the daemon sees the files of this process

    def __init__(self, *, may_start: bool) -> None:
        self._may_start = may_start
        self._connection = fast_http.connect(start=may_start, on_notice=_log.warning)
        self._turns = _Turns(self._connection.close)

    def request(self, method: str, path: str, query: Query | None = None, body: object = None) -> Answer:
        # A submission carries a token by which the daemon recognises it.
        with self._turns:
            answer: Answer = self._connection.request(method, path, query, body, is_repeatable=path == "/submissions")
        return answer

    def waiting(self) -> RetryingClient:
        """Return a connection of its own for requests that the daemon may delay. It repeats them if the daemon ends."""
        return RetryingClient(may_start=self._may_start, on_notice=_log.warning)

    def events(self, path: str, query: Query) -> Iterator[Answer]:
        with self._turns:
            self._connection.open()  # starts a daemon if none runs

        def dial() -> Any:
            connection = fast_http.dial(paths.socket_path())
            if connection is None:
                raise fast_http.NoDaemon("no daemon runs", hint="`gpuyard submit` starts one")
            return connection

        return _stream(dial, fast_http.render_request("GET", path, query, None, {}))

    def stop(self) -> Answer:
        pid = self.request("GET", "/status")["pid"]
        answer = self.request("POST", "/stop", body={})
        self.close()
        await_end(paths.lock_path(), pid)
        return answer

    def close(self) -> None:
        self._connection.close()


class WebTransport(fast_http.Closeable):
    is_local = False

    def __init__(self, url: str, token: str | None) -> None:
        """The token may be part of the URL, as `gpuyard web` prints it."""
        try:
            parts = urlsplit(url)
            host, self._port, found = parts.hostname, parts.port or 80, parse_qs(parts.query).get("token", [""])[0]
        except ValueError:
            host = None
        if host is None or parts.scheme != "http":  # the error does not quote the URL, which may contain the token
            raise UserError("this is not an address of the page", hint="`gpuyard web` prints it: http://HOST:PORT/…")
        self._host = host
        token = (token or found).strip()  # a token that is read from a file ends with a newline
        if not (token and token.isascii() and token.isprintable()):
            problem = "this is not a token of the page" if token else "the page needs a token"
            raise UserError(problem, hint="`gpuyard web` prints it behind the address")
        name = f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}"
        self._fields = {"Host": name, "Authorization": f"Bearer {token}", "Content-Type": "application/json"}

    def request(self, method: str, path: str, query: Query | None = None, body: object = None) -> Answer:
        status, content = self._exchange(method, path, query, body)
        version = __version__
        # The access rules of the page refuse with these before a route is looked up: they do not depend on the version.
        if status >= 400 and status not in (401, 403, 429):
            # The page sends it only to clients with the token. If it cannot be told, the first error says more.
            with contextlib.suppress(GpuyardError):
                version = fast_http.read_answer(*self._exchange("GET", "/status")).get("version", version)
        answer: Answer = fast_http.read_answer(status, content, version)
        return answer

    def _exchange(self, method: str, path: str, query: Query | None = None, body: object = None) -> tuple[int, bytes]:
        # One connection per request: the daemon may be restarted between two of them.
        try:
            with contextlib.closing(self._dial()) as connection:
                exchange = fast_http.Exchange(connection, _ANSWER_S)
                exchange.send(fast_http.render_request(method, path, query, body, self._fields))
                (status, content, _), _ = exchange.receive()
                return status, content
        except OSError as error:
            reason = error or "the connection was closed"
            raise EnvironmentFault(
                f"no daemon answers at {self._host}:{self._port}: {reason}",
                hint="run `gpuyard web` on the machine; it prints the address",
            ) from error

    def waiting(self) -> Self:
        return self

    def get(self, path: str, query: Query | None = None, timeout_s: float = 0.0) -> Answer:  # noqa: ARG002 - below 60 s
        return self.request("GET", path, query)

    def events(self, path: str, query: Query) -> Iterator[Answer]:
        return _stream(self._dial, fast_http.render_request("GET", path, query, None, self._fields))

    def stop(self) -> Answer:
        raise UserError("the daemon cannot be stopped over its page", hint="run `gpuyard daemon stop` on the machine")

    def close(self) -> None:
        """Do nothing: no connection is kept."""

    def _dial(self) -> socket.socket:
        return socket.create_connection((self._host, self._port), _ANSWER_S)


def _stream(open_connection: Callable[[], Any], message: bytes) -> Iterator[Answer]:
    pid = None
    try:
        with contextlib.closing(open_connection()) as connection:
            pid = user_sockets.peer_pid(connection)
            exchange = fast_http.Exchange(connection, _ANSWER_S)
            exchange.send(message)
            status, length, fields = exchange.receive_head()
            if length is not None:
                version = fields.get(fast_http.VERSION_FIELD.lower(), __version__)
                fast_http.read_answer(status, exchange.receive_content(length), version)
            yield from exchange.events(_ANSWER_S)
    except TimeoutError as error:
        raise silent(pid) from error
    except OSError as error:
        raise EnvironmentFault(f"the daemon has gone: {error}", hint="ask again") from error
