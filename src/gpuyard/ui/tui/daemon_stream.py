"""The daemon's answers and event streams for the terminal screen, over asyncio: the screen never blocks.

A stream that breaks is opened again. A daemon that was killed is started again; a daemon that a user stopped stays
stopped until a user starts it, as in `gpuyard.connect.retrying`.
"""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from typing import Any

from gpuyard.connect import paths
from gpuyard.connect.fast_http import VERSION_FIELD, NoDaemon, connect, dial, read_answer, read_head, render_request
from gpuyard.connect.retrying import has_crashed
from gpuyard.connect.silent_daemon import lock_holder, silent
from gpuyard.errors import EnvironmentFault

Answer = dict[str, Any]
_ANSWER_S = 10.0
# Heartbeats come every 15 s.
_SILENT_S = 40.0
_RETRY_S = 0.5
_LONGEST_EVENT = 64 * 1024 * 1024


class DaemonStream:
    """`on_connection` is called with a connection problem, and with None when the connection works again."""

    def __init__(self, on_connection: Callable[[str | None], None], retry_s: float = _RETRY_S) -> None:
        self._on_connection = on_connection
        self._retry_s = retry_s
        # One thread: after a crash, only one of the streams starts the next daemon.
        self._dialler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dial")

    async def ask(self, method: str, path: str, query: Mapping[str, str] | None = None, body: object = None) -> Answer:
        try:
            async with asyncio.timeout(_ANSWER_S), self._open(method, path, query, body) as (reader, length):
                content = await reader.readexactly(length or 0)
        except TimeoutError as error:
            raise silent(lock_holder()) from error
        except (OSError, EOFError) as error:
            raise EnvironmentFault("the daemon ended before it answered", hint="check whether it was done") from error
        answer: Answer = json.loads(content)
        return answer

    async def watch(self, target: str) -> AsyncGenerator[Answer, None]:
        """Yield the answer of a GET route, and again whenever it has changed, without end."""
        async with aclosing(self.follow("/events", {"watch": target})) as events:
            async for event in events:
                if event is not None:
                    yield event["answer"]

    async def follow(self, path: str, query: Mapping[str, str] | None = None) -> AsyncGenerator[Answer | None, None]:
        """Yield each event of a stream, and None whenever it is opened again. Ends only with a UserError."""
        while True:
            try:
                async with self._open("GET", path, query, None) as (reader, _):
                    self._on_connection(None)
                    yield None
                    async for event in _events(reader):
                        yield event
            except EnvironmentFault as error:
                self._on_connection(str(error))
            except TimeoutError:
                self._on_connection(str(silent(lock_holder())))
            except (OSError, EOFError):
                self._on_connection("the daemon has ended")
            await asyncio.sleep(self._retry_s)

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, query: Mapping[str, str] | None, body: object
    ) -> AsyncIterator[tuple[asyncio.StreamReader, int | None]]:
        """Send a request and read the head of the answer. Yield a reader and the length of the content, None if
        unknown."""
        connection = await self._dial()
        reader, writer = await asyncio.open_unix_connection(sock=connection, limit=_LONGEST_EVENT)
        try:
            writer.write(render_request(method, path, query, body, {}))
            status, length, fields = read_head(await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _ANSWER_S))
            if status >= 400:
                content = await asyncio.wait_for(reader.readexactly(length or 0), _ANSWER_S)
                read_answer(status, content, fields.get(VERSION_FIELD.lower()))
            yield reader, length
        finally:
            writer.close()

    async def _dial(self) -> socket.socket:
        """Connect in a thread. If this task is cancelled meanwhile, close the connection as soon as it is made."""
        dialling = self._dialler.submit(_dial)
        try:
            return await asyncio.wrap_future(dialling)
        except asyncio.CancelledError:
            dialling.add_done_callback(_close_connection)
            raise


def _dial() -> socket.socket:
    """Return a non-blocking socket that is connected to the daemon; start the daemon if it has crashed."""
    connection = dial(paths.socket_path())
    if connection is None and has_crashed():
        connect(start=True).close()
        connection = dial(paths.socket_path())
    if connection is None:
        raise NoDaemon("no daemon runs", hint="`gpuyard daemon start` starts one")
    made = socket.socket(fileno=connection.detach())
    made.settimeout(0.0)
    return made


def _close_connection(dialling: "Future[socket.socket]") -> None:
    if not dialling.cancelled() and dialling.exception() is None:
        dialling.result().close()


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[Answer]:
    while True:
        event = await asyncio.wait_for(reader.readuntil(b"\n\n"), _SILENT_S)
        data = b"".join(line[5:] for line in event.splitlines() if line.startswith(b"data:"))
        if data:
            yield json.loads(data)
