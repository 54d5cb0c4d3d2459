"""The daemon's sockets: HTTP/1.1 over a unix socket that only its owner (and root) can use; over TCP for its page.

Rules:
- A connection's requests are answered one after another, in order. A handler that answers at once costs no task.
- Nobody holds others up: who says nothing, sends half a request or does not read is let go when its time is up.
- A client that closes its end has gone: the handler it waits for is cancelled.
- Nobody gets to stay who was refused: those take no room from others.
- A viewer of a stream that has fallen behind is dropped, and can come back.
- Whatever a handler raises becomes an answer, and the daemon lives on: `UserError` 400, `EnvironmentFault` 503,
  anything else 500 and a line in the log.
- Whoever serves holds the daemon's lock: a socket file that is there already is a dead daemon's.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

from msgspec import Struct

from gpuyard.daemon.server.http_parser import (
    CONTINUE,
    MAX_BODY_BYTES,
    MAX_HEAD_BYTES,
    Fields,
    HttpError,
    Parser,
    Request,
    Response,
    ResponseStream,
    error_response,
    render,
    render_head,
)
from gpuyard.daemon.server.unix_socket import FIELDS, bind, refuse_if_too_old, refuse_other_users
from gpuyard.errors import EnvironmentFault, UserError

Answer = Response | ResponseStream
Handler = Callable[[Request], Answer | Awaitable[Answer]]
# Why somebody who has just connected is not let in; `None` where they are.
Doorkeeper = Callable[[socket.socket], str | None]
# Raises `Refused` where nothing will come of a request, before its body is read.
Vetting = Callable[[Request], None]
_log = logging.getLogger(__name__)
# As many requests that were sent ahead are answered before others have their turn: a few milliseconds.
_IN_A_ROW = 32


class ConnectionLimits(Struct, frozen=True, kw_only=True):
    """How many may be connected, and for how long they may keep the daemon waiting."""

    connections: int = 512
    silent_s: float = 60.0  # before the first request; afterwards a connection may rest as long as it likes
    half_request_s: float = 30.0
    unread_answer_s: float = 30.0
    # A refused client is left this long to read why: closing at once would break what it is still sending.
    refused_s: float = 2.0
    body_bytes: int = MAX_BODY_BYTES
    # What a viewer of a stream may have left unread.
    unread_bytes: int = 1_048_576


class Server:
    """Serves until it is closed; then the socket's file, where it has one, is gone."""

    def __init__(  # noqa: PLR0913 - what is decided for it
        self,
        handler: Handler,
        limits: ConnectionLimits,
        doorkeeper: Doorkeeper,
        path: Path | None = None,
        *,
        vet: Vetting = lambda _: None,
        fields: Fields = (),
    ) -> None:
        self.handler, self.limits, self.doorkeeper, self.path = handler, limits, doorkeeper, path
        self.vet, self.fields = vet, fields
        self._open: set[_Connection] = set()
        self._refused: set[_Connection] = set()
        self._listener: asyncio.Server | None = None

    async def start(self, listening: socket.socket) -> None:
        loop, backlog = asyncio.get_running_loop(), self.limits.connections
        if listening.family == socket.AF_UNIX:
            self._listener = await loop.create_unix_server(lambda: _Connection(self), sock=listening, backlog=backlog)
        else:
            self._listener = await loop.create_server(lambda: _Connection(self), sock=listening, backlog=backlog)

    @property
    def connections(self) -> int:
        return len(self._open)

    @property
    def is_closed(self) -> bool:
        return self._listener is None

    def close(self) -> None:
        """Nobody new gets in, handlers that are awaited are cancelled, and answers already given are still sent."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            if self.path is not None:
                self.path.unlink(missing_ok=True)
        for connection in [*self._open, *self._refused]:
            connection.close()

    def join(self, connection: "_Connection") -> None:
        self._open.add(connection)

    def leave(self, connection: "_Connection") -> None:
        self._open.discard(connection)
        self._refused.discard(connection)

    def may_linger(self, connection: "_Connection") -> bool:
        """Of one that was refused: whether there is time for it to read why."""
        self._open.discard(connection)
        self._refused.add(connection)
        return len(self._refused) <= self.limits.connections


async def serve(path: str | Path, handler: Handler, *, limits: ConnectionLimits | None = None) -> Server:
    """On a unix socket, for this user alone."""
    listening = bind(Path(path))
    server = Server(
        handler, limits or ConnectionLimits(), refuse_other_users, Path(path), vet=refuse_if_too_old, fields=FIELDS
    )
    await server.start(listening)
    return server


async def serve_at(  # noqa: PLR0913 - as above
    listening: socket.socket,
    handler: Handler,
    limits: ConnectionLimits,
    doorkeeper: Doorkeeper,
    *,
    vet: Vetting,
    fields: Fields,
) -> Server:
    """On a socket that is bound already; `fields` are in the head of every answer."""
    server = Server(handler, limits, doorkeeper, vet=vet, fields=fields)
    await server.start(listening)
    return server


class _Connection(asyncio.Protocol):
    """One client's; it goes on with its next request when the last one is answered and the answer is on its way."""

    _transport: asyncio.Transport

    def __init__(self, server: Server) -> None:
        self._server = server
        self._parser = Parser(server.limits.body_bytes)
        self._end_stream: Callable[[], None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._turn: asyncio.Handle | None = None  # it comes when others have had theirs
        self._has_spoken = False
        self._is_handling = False
        self._is_vetted = False
        self._is_blocked = False  # by a client that does not read
        self._is_over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self._server.is_closed:  # it was accepted just before; what its requests need may be gone by now
            self._is_over = True
            self._transport.abort()
            return
        self._server.join(self)
        limits = self._server.limits
        unwelcome = self._server.doorkeeper(self._transport.get_extra_info("socket"))
        if unwelcome is not None:
            self._refuse(HttpError(403, unwelcome))
        elif self._server.connections > limits.connections:
            message = f"the daemon has {limits.connections} connections, and takes no more"
            self._refuse(HttpError(503, message, hint="try again when others have gone"))
        else:
            self._allow(limits.silent_s, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        if not self._has_spoken:
            self._has_spoken = True
            self._allow_any_time()
        self._parser.feed(data)
        if self._task is None and self._turn is None and not self._is_blocked:
            self._go_on()
        elif self._parser.unread_bytes > MAX_HEAD_BYTES:
            self._transport.pause_reading()

    def eof_received(self) -> None:
        self.close()

    def pause_writing(self) -> None:
        self._is_blocked = True
        self._allow(self._server.limits.unread_answer_s, self._transport.abort)

    def resume_writing(self) -> None:
        self._is_blocked = False
        if self._end_stream is not None and not self._transport.is_closing():
            self._allow_any_time()
        elif not self._is_over:
            self._allow_any_time()
            if self._turn is None:
                self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio calls it so
        self._is_over = True
        self._server.leave(self)
        self._allow_any_time()
        if self._task is not None:
            self._task.cancel()
        if self._end_stream is not None:
            self._end_stream()
            self._end_stream = None

    def send(self, data: bytes) -> None:
        """To the viewer of a stream. What it has left unread counts, and not how long the next message is."""
        if self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > self._server.limits.unread_bytes:
            self._transport.abort()
        else:
            self._transport.write(data)

    def end(self) -> None:
        """Of a stream."""
        self._end()

    def close(self) -> None:
        """After what is being answered at this moment; a handler that is awaited is cancelled."""
        if self._is_handling:
            self._is_over = True
            return
        if self._task is not None:
            self._task.cancel()
        self._end()

    def _go_on(self) -> None:
        """Handles what has come so far, or some of it."""
        for _ in range(_IN_A_ROW):
            if self._task is not None or self._is_blocked or self._is_over:
                return
            try:
                request = self._parser.take()
            except HttpError as refused:
                self._refuse(refused)
                return
            if request is None:
                self._await_more()
                return
            if self._timer is not None:
                self._allow_any_time()
            self._handle(request)
        self._turn = asyncio.get_running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._turn = None
        self._go_on()

    def _await_more(self) -> None:
        if not self._is_vetted and (awaited := self._parser.awaited) is not None and not self._vet(awaited):
            return
        if self._parser.awaits_consent:
            self._transport.write(CONTINUE)
        if self._parser.is_amid_request and self._timer is None:
            self._allow(self._server.limits.half_request_s, self._refuse_half)
        self._transport.resume_reading()

    def _vet(self, request: Request) -> bool:
        try:
            self._server.vet(request)
        except HttpError as refused:
            self._refuse(refused, has_body=request.method != "HEAD")
            return False
        self._is_vetted = True
        return True

    def _refuse_half(self) -> None:
        self._refuse(HttpError(408, "the rest of the request did not come in time"))

    def _handle(self, request: Request) -> None:
        is_last = self._parser.is_last
        if not self._is_vetted and not self._vet(request):
            return
        self._is_handling, self._is_vetted = True, False
        try:
            answer = self._server.handler(request)
        except Exception as error:  # noqa: BLE001 - whatever it is, the daemon lives on
            answer = failure(request, error)
        self._is_handling = False
        if isinstance(answer, Response | ResponseStream):
            self._answer(request, answer, is_last=is_last)
        else:
            task = self._answer_later(request, answer, is_last=is_last)
            self._task = asyncio.get_running_loop().create_task(task)
            if self._is_over:  # the handler closed the server; what it began is to begin before it is cancelled
                asyncio.get_running_loop().call_soon(self.close)

    async def _answer_later(self, request: Request, answer: Awaitable[Answer], *, is_last: bool) -> None:
        response: Answer
        try:
            response = await answer
        except asyncio.CancelledError:
            self._transport.abort()
            raise
        except Exception as error:  # noqa: BLE001 - as above
            response = failure(request, error)
        self._task = None
        self._answer(request, response, is_last=is_last)
        self._go_on()

    def _answer(self, request: Request, response: Answer, *, is_last: bool) -> None:
        if self._transport.is_closing():
            return
        if isinstance(response, ResponseStream):
            self._begin_stream(response, has_body=request.method != "HEAD")
            return
        is_last = is_last or response.is_last or self._is_over
        has_body, fields = request.method != "HEAD", self._server.fields
        self._transport.write(render(response, is_last=is_last, has_body=has_body, fields=fields))
        if is_last:
            self._end()

    def _begin_stream(self, stream: ResponseStream, *, has_body: bool) -> None:
        """It is the connection's last answer; whatever else is sent is not read."""
        self._is_over = True
        self._transport.write(render_head(stream, self._server.fields))
        if has_body:
            self._end_stream = stream.begin(self)
        else:
            self._end()

    def _refuse(self, refused: HttpError, *, has_body: bool = True) -> None:
        self._is_over = True
        if not self._server.may_linger(self):
            self._transport.abort()
            return
        response = error_response(refused.status, refused.message, refused.hint, refused.headers)
        self._transport.write(render(response, is_last=True, has_body=has_body, fields=self._server.fields))
        try:
            self._transport.write_eof()
        except OSError:  # they have gone
            self._transport.abort()
        else:
            self._allow(self._server.limits.refused_s, self._transport.abort)

    def _end(self) -> None:
        self._is_over = True
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._allow(self._server.limits.unread_answer_s, self._transport.abort)

    def _allow(self, seconds: float, then: Callable[[], None]) -> None:
        self._allow_any_time()
        self._timer = asyncio.get_running_loop().call_later(seconds, then)

    def _allow_any_time(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def failure(request: Request, error: Exception) -> Response:
    """The answer to a request that failed."""
    if isinstance(error, HttpError):
        return error_response(error.status, error.message, error.hint, error.headers)
    if isinstance(error, UserError):
        return error_response(400, error.message, error.hint)
    if isinstance(error, EnvironmentFault):
        return error_response(503, error.message, error.hint)
    _log.error("%s %s failed", request.method, request.path, exc_info=error)
    message = f"the daemon failed at {request.method} {request.path}: {type(error).__name__}: {error}"
    return error_response(500, message, "this is a bug; daemon.log says more")
