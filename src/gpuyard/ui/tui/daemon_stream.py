"""The way to the daemon for a screen that is never to stand still: everything is asked without waiting for it.

A stream that breaks is opened again, and whoever follows it is told of both. A daemon that was killed is started again;
one that was stopped stays so until somebody starts it, as for all who wait (`gpuyard.connect.retrying`).
"""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any
from urllib.parse import quote, urlencode

from gpuyard.connect import paths
from gpuyard.connect.fast_http import VERSION_FIELD, NoDaemon, connect, read_answer
from gpuyard.connect.retrying import has_crashed
from gpuyard.errors import EnvironmentFault
from gpuyard.version import API

Answer = dict[str, Any]
_ANSWER_S = 30.0
# Heartbeats come every 15 s.
_SILENT_S = 40.0
_RETRY_S = 0.5
_LONGEST_EVENT = 64 * 1024 * 1024


class DaemonStream:
    """`told` is called with what is wrong with the way to the daemon, and with None when it is open again."""

    def __init__(self, told: Callable[[str | None], None], retry_s: float = _RETRY_S) -> None:
        self._told = told
        self._retry_s = retry_s
        self._dialling = threading.Lock()

    async def ask(self, method: str, path: str, query: Mapping[str, str] | None = None, body: object = None) -> Answer:
        """The answer, decoded; an error is raised as what it is."""
        try:
            async with asyncio.timeout(_ANSWER_S), self._open(method, path, query, body) as (reader, length):
                content = await reader.readexactly(length or 0)
        except TimeoutError as error:
            raise EnvironmentFault(
                f"the daemon did not answer within {_ANSWER_S:g} s", hint=f"{paths.log_path()} may say why"
            ) from error
        except (OSError, EOFError) as error:
            raise EnvironmentFault("the daemon ended before it answered", hint="see whether it was done") from error
        answer: Answer = json.loads(content)
        return answer

    async def watch(self, *targets: str) -> AsyncGenerator[tuple[str, Answer], None]:
        """What can be asked with GET, each answer again whenever it has changed, for ever."""
        async with aclosing(self.follow("/events", {"watch": " ".join(targets)})) as events:
            async for event in events:
                if event is not None:
                    yield event["watch"], event["answer"]

    async def follow(self, path: str, query: Mapping[str, str] | None = None) -> AsyncGenerator[Answer | None, None]:
        """Each event of a stream, and None whenever it begins anew; ends only by an error that is the asker's."""
        while True:
            try:
                async with self._open("GET", path, query, None) as (reader, _):
                    self._told(None)
                    yield None
                    async for event in _events(reader):
                        yield event
            except (OSError, EOFError, EnvironmentFault) as error:
                self._told(_what_is_wrong(error))
            await asyncio.sleep(self._retry_s)

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, query: Mapping[str, str] | None, body: object
    ) -> AsyncIterator[tuple[asyncio.StreamReader, int | None]]:
        """A connection with the answer's head read, and how long the answer is where that is known."""
        dialled = await asyncio.to_thread(self._dial)
        reader, writer = await asyncio.open_unix_connection(sock=dialled, limit=_LONGEST_EVENT)
        try:
            writer.write(_render(method, path, query, body))
            status, length, version = _read_head(await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _ANSWER_S))
            if status >= 400:
                read_answer(status, await asyncio.wait_for(reader.readexactly(length or 0), _ANSWER_S), version)
            yield reader, length
        finally:
            writer.close()

    def _dial(self) -> socket.socket:
        """One at a time: where several streams have lost their daemon, one of them starts the next."""
        with self._dialling:
            try:
                return _connect()
            except (FileNotFoundError, ConnectionRefusedError) as error:
                if not has_crashed():
                    raise NoDaemon("no daemon runs", hint="`gpuyard daemon start` starts one") from error
            connect(start=True).close()
            return _connect()


def _what_is_wrong(error: Exception) -> str:
    if isinstance(error, EnvironmentFault):
        return str(error)
    return "the daemon does not answer" if isinstance(error, TimeoutError) else "the daemon has ended"


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[Answer]:
    while True:
        told = await asyncio.wait_for(reader.readuntil(b"\n\n"), _SILENT_S)
        data = b"".join(line[5:] for line in told.splitlines() if line.startswith(b"data:"))
        if data:
            yield json.loads(data)


def _connect() -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_ANSWER_S)
        paths.reach(paths.socket_path(), connection.connect)
    except OSError:
        connection.close()
        raise
    connection.settimeout(0.0)
    return connection


def _render(method: str, path: str, query: Mapping[str, str] | None, body: object) -> bytes:
    target = API + quote(path) + (f"?{urlencode(query, quote_via=quote)}" if query else "")
    content = b"" if body is None else json.dumps(body).encode()
    return f"{method} {target} HTTP/1.1\r\nHost: gpuyard\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


def _read_head(head: bytes) -> tuple[int, int | None, str | None]:
    """Status, length of the content, and the daemon's version, as far as they are told."""
    line, *fields = head.decode("latin-1").split("\r\n")
    told = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
    length = told.get("content-length")
    return int(line.split(" ")[1]), None if length is None else int(length), told.get(VERSION_FIELD.lower())
