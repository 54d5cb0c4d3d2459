"""The two ways to the daemon for programs: its own socket, and the page's port with its token.

Over its own socket it is started where none runs, and a wait goes on with the next daemon where this one has gone. Over
the page's port it may be another machine's, to which a port is forwarded: nothing is started, and no file is near.

A daemon of another version is treated as by the command line, but what the user should know is logged as a warning of
the logger `gpuyard`. Over the page's port it is never restarted; an error names both versions.

Threads may share a way: requests take turns, and whatever takes long has a connection of its own. So may a process and
those it forks: each has its own connection, as otherwise one would read what another was answered.
"""

import http.client
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, Protocol, Self
from urllib.parse import parse_qs, urlsplit

from gpuyard.connect import paths
from gpuyard.connect.daemon_lock import await_end
from gpuyard.connect.fast_http import VERSION_FIELD, connect, encode, read_answer, target_of
from gpuyard.connect.retrying import RetryingClient
from gpuyard.errors import EnvironmentFault, GpuyardError, UserError
from gpuyard.version import __version__

Query = dict[str, str]
Answer = dict[str, Any]

_ANSWER_AFTER_S = 60.0
# The daemon says in a stream that it is still there every 15 seconds.
_SILENT_S = 60.0
_EVENT = b"data: "
# They come from the gate, before anything that one version knows and another does not.
_REFUSED_AT_GATE = (401, 403, 429)
_log = logging.getLogger("gpuyard")


class Transport(Protocol):
    # Whether the daemon sees the files and the folder of whoever asks.
    is_near: bool

    def request(self, method: str, path: str, query: Query | None = None, body: object = None) -> Answer: ...

    def patient(self) -> "WaitingTransport":
        """For questions that the daemon may think about, over a connection of its own."""
        ...

    def events(self, path: str, query: Query) -> Iterator[Answer]: ...

    def stop(self) -> Answer:
        """Returns when the daemon has ended."""
        ...

    def close(self) -> None: ...


class WaitingTransport(Protocol):
    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def get(self, path: str, query: Query | None = None, timeout_s: float = 0.0) -> Answer:
        """Within so long, asked again where the daemon has gone meanwhile."""
        ...


class _Turns:
    """One at a time; a forked process leaves its parent's connection alone."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave, self._pid, self._lock = leave, os.getpid(), threading.Lock()

    def __enter__(self) -> None:
        if self._pid != os.getpid():
            self._pid, self._lock = os.getpid(), threading.Lock()  # a thread that was not forked may have held it
            self._leave()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class SocketTransport:
    is_near = True

    def __init__(self, *, may_start: bool) -> None:
        self._may_start = may_start
        self._connection = connect(start=may_start, tell=_log.warning)
        self._turns = _Turns(self._connection.close)

    def request(self, method: str, path: str, query: Query | None = None, body: object = None) -> Answer:
        # A submission carries a token by which the daemon knows it.
        is_repeatable = path == "/submissions"
        with self._turns:
            answer: Answer = self._connection.request(method, path, query, body, is_repeatable=is_repeatable)
        return answer

    def patient(self) -> RetryingClient:
        return RetryingClient(may_start=self._may_start, tell=_log.warning)

    def events(self, path: str, query: Query) -> Iterator[Answer]:
        with self._turns:
            self._connection.open()  # it is started where none runs
        return _events(_UnixConnection(timeout=_SILENT_S), target_of(path, query), {})

    def stop(self) -> Answer:
        pid = self.request("GET", "/status")["pid"]
        answer = self.request("POST", "/stop", body={})
        self.close()
        await_end(paths.lock_path(), pid)
        return answer

    def close(self) -> None:
        self._connection.close()


class WebTransport:
    is_near = False

    def __init__(self, url: str, token: str | None) -> None:
        """The token may be in the URL, as `gpuyard web` prints it."""
        self._host, self._port, found = _read_address(url)
        token = (token or found).strip()  # from a file it may have the end of its line
        if not token:
            raise UserError("the page is locked with a token", hint="`gpuyard web` prints it behind the address")
        if not (token.isascii() and token.isprintable()):
            raise UserError("this is no token of the page", hint="`gpuyard web` prints it behind the address")
        self._fields = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def request(self, method: str, path: str, query: Query | None = None, body: object = None) -> Answer:
        content = None if body is None else encode(body).encode()
        status, told = self._exchange(method, target_of(path, query), content)
        is_strange = status >= 400 and status not in _REFUSED_AT_GATE
        read: Answer = read_answer(status, told, self._version() if is_strange else __version__)
        return read

    def _exchange(self, method: str, target: str, content: bytes | None = None) -> tuple[int, bytes]:
        # None is kept: the daemon may be restarted meanwhile, and whether one that broke had been heard is never known.
        with closing(self._connect(_ANSWER_AFTER_S)) as connection:
            try:
                connection.request(method, target, content, self._fields)
                answer = connection.getresponse()
                return answer.status, answer.read()
            except (OSError, http.client.HTTPException) as error:
                raise EnvironmentFault(f"no daemon answers at {self._host}:{self._port}: {error}", hint=_ASK) from error

    def _version(self) -> str:
        """The daemon's; ours where it does not say. No head has it here: nobody without the token is told."""
        try:
            told: dict[str, str] = read_answer(*self._exchange("GET", target_of("/status")))
        except GpuyardError:  # what went wrong before is told, and says more
            return __version__
        return told.get("version", __version__)

    def patient(self) -> Self:
        return self

    def get(self, path: str, query: Query | None = None, timeout_s: float = 0.0) -> Answer:  # noqa: ARG002 - well within
        return self.request("GET", path, query)

    def events(self, path: str, query: Query) -> Iterator[Answer]:
        return _events(self._connect(_SILENT_S), target_of(path, query), self._fields)

    def stop(self) -> Answer:
        raise UserError("the daemon cannot be stopped over its page", hint="run `gpuyard daemon stop` on the machine")

    def close(self) -> None:
        """Nothing is open."""

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, timeout: float) -> None:
        super().__init__("gpuyard", timeout=timeout)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        paths.reach(paths.socket_path(), self.sock.connect)


def _read_address(url: str) -> tuple[str, int, str]:
    """Host, port, and the token, where it has one. What it is stays unsaid in the error: the token may be in it."""
    try:
        parts = urlsplit(url)
        host, port, token = parts.hostname, parts.port or 80, parse_qs(parts.query).get("token", [""])[0]
    except ValueError:
        host = None
    if host is None or parts.scheme != "http":
        raise UserError("this is no address of the page", hint="it is as `gpuyard web` prints it: http://HOST:PORT/…")
    return host, port, token


def _events(connection: http.client.HTTPConnection, target: str, fields: dict[str, str]) -> Iterator[Answer]:
    """What a stream tells until it ends."""
    with closing(connection):
        try:
            connection.request("GET", target, headers=fields)
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                read_answer(answer.status, answer.read(), answer.headers.get(VERSION_FIELD, __version__))
            while line := answer.readline():
                if line.startswith(_EVENT):
                    yield json.loads(line.removeprefix(_EVENT))
        except (OSError, http.client.HTTPException) as error:
            raise EnvironmentFault(f"the daemon has gone: {error}", hint="ask again") from error


_ASK = "run `gpuyard web` on the machine; it prints the address"
