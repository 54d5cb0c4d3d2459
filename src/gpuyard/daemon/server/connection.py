"""The HTTP server of the daemon: on a unix socket for its owner (and root), over TCP for the web page.

- The requests of a connection are answered in order, one at a time. The handler of a client that goes is cancelled. An
exception of a handler becomes a response.
- No client can delay others: one that sends nothing, sends half a request or does not read what it asked for is
disconnected after a time limit. Refused clients, and strangers (who have not sent a token), use up no connections.
- The caller of `serve` holds the daemon's lock, so an existing socket file was left by a dead daemon.
"""

import asyncio
import contextlib
import ipaddress
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar, cast

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.client.fast_http import AT_LEAST_FIELD, TOO_OLD, VERSION_FIELD
from gpuyard.daemon.server import http_messages as http
from gpuyard.daemon.server.http_messages import failure
from gpuyard.errors import EnvironmentFault
from gpuyard.model.version_order import is_newer
from gpuyard.system import user_sockets
from gpuyard.system.private_files import make_folder
from gpuyard.system.system_limits import open_files_limit
from gpuyard.version import __version__

T = TypeVar("T")
HttpAnswer = http.Response | http.ResponseStream
Handler = Callable[[http.Request], Awaitable[HttpAnswer]]
# Return why this client is refused, or None to accept it.
PeerCheck = Callable[[socket.socket], str | None]
# Raise HttpError to refuse a request before its body is read. Return whether it proves that its client has access.
HeadCheck = Callable[[http.Request], bool]
COMMON_HEADERS: http.Headers = ((VERSION_FIELD, __version__),)


def refuse_if_too_old(request: http.Request) -> bool:
    """Refuse a request that demands a newer daemon than this one, before anything is done. Otherwise return True."""
    wanted = request.headers.get(AT_LEAST_FIELD.lower(), __version__)
    if wanted != __version__ and is_newer(wanted, __version__):
        raise http.HttpError(
            TOO_OLD,
            f"the daemon is version {__version__}, but the request needs at least {wanted[:100]}",
            hint="`gpuyard daemon restart` (running jobs go on)",
        )
    return True


def refuse_other_users(connection: socket.socket) -> str | None:
    """Return why the client is refused, or None."""
    return None if user_sockets.is_same_user(connection) else "this daemon belongs to another user"


def bind(path: Path) -> socket.socket:
    try:
        make_folder(str(path.parent))
        return user_sockets.bind(str(path))
    except OSError as error:
        raise EnvironmentFault(
            f"the daemon's socket {path} cannot be created: {error.strerror or error}",
            hint="set GPUYARD_HOME to another directory",
        ) from error


def file_identity(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of a file, or None if it is gone."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        return status.st_dev, status.st_ino
    return None


class StrangerLimit(Generic[T]):
    """At most so many strangers, who may never send a token. There is always room for one more: the oldest of the
    network with the most strangers is dropped for it. So a client that sends its token at once gets in."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._network_of: dict[T, str] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._network_of)

    def __iter__(self) -> Iterator[T]:
        return iter(self._network_of)

    def add(self, stranger: T, network: str) -> T | None:
        """Add a stranger. Return the one that has to go for it, or None."""
        dropped = None
        if len(self._network_of) >= self._most:
            ((largest, _),) = Counter(self._network_of.values()).most_common(1)
            dropped = next(each for each, its in self._network_of.items() if its == largest)
            self.discard(dropped)
        self._network_of[stranger] = network
        return dropped

    def discard(self, stranger: T) -> None:
        self._network_of.pop(stranger, None)


def network_of(peer: object) -> str:
    """Return the network of a peer's socket address: an IPv4 address, or the first 64 bits of an IPv6 address."""
    if not isinstance(peer, tuple):  # None: the client has gone
        return ""
    found = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is None:
        return str(ipaddress.ip_network((found, 64), strict=False))  # one customer usually has that many addresses
    return str(getattr(found, "ipv4_mapped", None) or found)


class ConnectionLimits(Struct, frozen=True, kw_only=True):
    """`strangers`: how many clients may be connected before they have proven that they have access, in addition to
    `connections`. None: `check_peer` alone decides about access."""

    connections: int = 512
    strangers: int | None = None
    # Before the first request; later a connection may idle without limit. A stranger must send its whole head by then.
    silent_s: float = 60.0
    half_request_s: float = 30.0
    unread_answer_s: float = 30.0
    # How long a refused client may read the reason: closing at once would reset the connection while it still sends.
    refused_s: float = 2.0
    body_bytes: int = http.MAX_BODY_BYTES
    # How much of a stream the daemon buffers for a client that does not read.
    unread_bytes: int = 1_048_576


class Server:
    """Accept connections until it is closed. Closing removes the socket file at `path`, if there is one."""

    def __init__(  # noqa: PLR0913 - the differences between the two listeners
        self,
        handler: Handler,
        limits: ConnectionLimits,
        check_peer: PeerCheck,
        check_head: HeadCheck,
        *,
        common_headers: http.Headers = (),
        path: Path | None = None,
    ) -> None:
        self.handler, self.limits, self.check_peer, self.check_head = handler, limits, check_peer, check_head
        self.common_headers, self.path = common_headers, path
        self.open: set[_Connection] = set()
        self.strangers = StrangerLimit[_Connection](limits.strangers or 0)
        self.refused: set[_Connection] = set()  # they wait to read their refusal
        self.listener: asyncio.Server | None = None

    async def start(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        create = loop.create_unix_server if listening.family == socket.AF_UNIX else loop.create_server
        # asyncio accepts up to `backlog` connections in a row. When no more files can be opened it tries just as often,
        # each time with a traceback in the log and one more retry a second later: it may try once.
        self.listener = await create(lambda: _Connection(self), sock=listening, backlog=1)
        listening.listen(self.limits.connections)
        self._socket_file = file_identity(self.path) if self.path is not None else None

    async def listen_again(self) -> None:
        """Bind the socket file anew after it was removed. Open connections stay. Raises EnvironmentFault."""
        assert self.path is not None
        listening = bind(self.path)
        if self.listener is not None:
            self.listener.close()
        await self.start(listening)

    def close(self) -> None:
        """Stop accepting clients and cancel handlers that are awaited. Responses already written are still sent."""
        if self.listener is not None:
            self.listener.close()
            self.listener = None
            if self.path is not None and self._socket_file == file_identity(self.path):
                self.path.unlink(missing_ok=True)  # not that of a daemon that has bound the path since
        for connection in [*self.open, *self.refused, *self.strangers]:
            connection.close()

    def forget(self, connection: "_Connection") -> None:
        self.open.discard(connection)
        self.refused.discard(connection)
        self.strangers.discard(connection)


async def serve(path: str | Path, handler: Handler, *, limits: ConnectionLimits | None = None) -> Server:
    """Serve on a unix socket at `path`, for this user and root."""
    listening = bind(Path(path))
    if limits is None:  # half of the files that this process may open are for other things
        limits = ConnectionLimits()
        limits = replace(limits, connections=min(limits.connections, open_files_limit() // 2))
    server = Server(
        handler, limits, refuse_other_users, refuse_if_too_old, common_headers=COMMON_HEADERS, path=Path(path)
    )
    await server.start(listening)
    return server


def answer_of(request: http.Request, future: "asyncio.Future[HttpAnswer]") -> HttpAnswer:
    """Return the response that a handler was awaited for. `future` is done and was not cancelled."""
    error = future.exception()
    return future.result() if error is None else failure(request, error)


class _Connection(asyncio.Protocol):
    """One client. The next request is handled when the response to the last one has been written."""

    _transport: asyncio.Transport

    def __init__(self, server: Server) -> None:
        self._server = server
        self._reader = http.RequestReader(server.limits.body_bytes)
        self._stop_stream: Callable[[], object] | None = None
        self._awaited: asyncio.Future[HttpAnswer] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_known = False  # the client has proven that it has access
        self._has_sent = False
        self._is_checked = False  # the head of the current request
        self._is_blocked = False  # the client does not read
        self._is_over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self._server.listener is None:  # accepted just before; what its requests need may be gone by now
            self.abort()
            return
        silent_s = self._server.limits.silent_s
        refusal = self._server.check_peer(self._transport.get_extra_info("socket"))
        if refusal is not None:
            self._refuse(http.HttpError(403, refusal))
        elif self._server.limits.strangers is not None:
            dropped = self._server.strangers.add(self, network_of(self._transport.get_extra_info("peername")))
            if dropped is not None:
                dropped.abort()
            self._set_timer(silent_s, self.abort)
        elif self._has_place():
            self._set_timer(silent_s, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        if not self._has_sent and self._is_known:  # a stranger's time goes on
            self._cancel_timer()
        self._has_sent = True
        self._reader.feed(data)
        if self._is_busy:
            if len(self._reader.unread) > http.MAX_HEAD_BYTES:
                self._transport.pause_reading()
        else:
            self._handle_next()

    def eof_received(self) -> None:
        self.close()

    def pause_writing(self) -> None:
        self._is_blocked = True
        self._set_timer(self._server.limits.unread_answer_s, self._transport.abort)

    def resume_writing(self) -> None:
        self._is_blocked = False
        if not self._is_over or (self._stop_stream is not None and not self._transport.is_closing()):
            self._cancel_timer()
            self._handle_next()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the signature of asyncio
        self._is_over = True
        self._server.forget(self)
        self._cancel_timer()
        if self._awaited is not None:
            self._awaited.cancel()
        if self._stop_stream is not None:
            self._stop_stream()
            self._stop_stream = None

    def send(self, data: bytes) -> None:
        """Write to a stream. Only earlier unread data counts towards the limit, not the length of `data`."""
        if self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > self._server.limits.unread_bytes:
            self._transport.abort()
        else:
            self._transport.write(data)

    def end(self) -> None:
        """Close the connection when the client has read what was written, or has not for `unread_answer_s`."""
        self._is_over = True
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._set_timer(self._server.limits.unread_answer_s, self._transport.abort)

    def abort(self) -> None:
        self._is_over = True
        self._transport.abort()

    def close(self) -> None:
        """End the connection, and cancel a handler that is awaited."""
        if self._awaited is not None:
            self._awaited.cancel()
        self.end()

    @property
    def _is_busy(self) -> bool:
        return self._awaited is not None or self._is_blocked

    def _handle_next(self) -> None:
        reader = self._reader
        if self._is_busy or self._is_over:
            return
        try:
            request = reader.take()
        except http.HttpError as refusal:
            self._refuse(refusal)
            return
        if request is not None:
            self._cancel_timer()
            is_last = reader.is_last
            if self._is_accepted(request):
                self._is_checked = False
                self._awaited = asyncio.ensure_future(self._server.handler(request))
                self._awaited.add_done_callback(lambda future: self._answer(request, future, is_last=is_last))
            return
        if reader.head is not None and not self._is_accepted(reader.head):
            return
        if reader.expects_continue:
            self._transport.write(http.CONTINUE)
        if (reader.head is not None or reader.unread) and self._timer is None:
            late = http.HttpError(408, "the rest of the request did not arrive in time")
            self._set_timer(self._server.limits.half_request_s, lambda: self._refuse(late))
        self._transport.resume_reading()

    def _is_accepted(self, request: http.Request) -> bool:
        """Check the head of the current request once; refuse it if the check fails."""
        if not self._is_checked:
            try:
                has_access = self._server.check_head(request)
            except http.HttpError as refusal:
                self._refuse(refusal, has_body=request.method != "HEAD")
                return False
            if has_access and not self._is_known:
                self._cancel_timer()
                if not self._has_place():
                    return False
            self._is_checked = True
        return True

    def _has_place(self) -> bool:
        """Count the client as one that has access. Refuse it, and return False, if there are too many of them."""
        limit = self._server.limits.connections
        if len(self._server.open) >= limit:
            message = f"the daemon has {limit} connections, which is its limit"
            self._refuse(http.HttpError(503, message, hint="try again later, or end other clients"))
            return False
        self._server.forget(self)
        self._server.open.add(self)
        self._is_known = True
        return True

    def _answer(self, request: http.Request, future: "asyncio.Future[HttpAnswer]", *, is_last: bool) -> None:
        self._awaited = None
        if future.cancelled():
            self._transport.abort()
        if self._transport.is_closing():
            return
        answer = answer_of(request, future)
        has_body, common = request.method != "HEAD", self._server.common_headers
        if isinstance(answer, http.ResponseStream):
            self._is_over = True  # a stream is the last response of its connection: nothing more is read
            self._transport.write(http.render_stream_head(answer, common))
            if has_body:
                self._stop_stream = answer.start(self)
            else:
                self.end()
            return
        is_last = is_last or answer.is_last or self._is_over
        self._transport.write(http.render(answer, is_last=is_last, has_body=has_body, common_headers=common))
        if is_last:
            self.end()
        else:
            self._handle_next()

    def _refuse(self, refusal: http.HttpError, *, has_body: bool = True) -> None:
        self._is_over = True
        self._server.forget(self)
        self._server.refused.add(self)
        if len(self._server.refused) > self._server.limits.connections:
            self._transport.abort()
            return
        response = http.error_response(refusal.status, refusal.message, refusal.hint, refusal.headers)
        common = self._server.common_headers
        self._transport.write(http.render(response, is_last=True, has_body=has_body, common_headers=common))
        try:
            self._transport.write_eof()
        except OSError:  # the client has gone
            self._transport.abort()
        else:
            self._set_timer(self._server.limits.refused_s, self._transport.abort)

    def _set_timer(self, seconds: float, then: Callable[[], None]) -> None:
        self._cancel_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, then)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
