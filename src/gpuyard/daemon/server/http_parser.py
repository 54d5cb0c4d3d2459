"""HTTP/1.1 as far as the daemon speaks it: bytes become requests, responses become bytes. No socket, no clock.

Rules:
- What might be read in two ways is refused: a body whose length is not told, or told twice; a line that is no field.
- A refusal is JSON, `{"error": …, "hint": …}`, as every error the daemon answers with.
- Heads have at most 64 KiB, bodies 64 MiB unless less is said.
- A stream is an answer without an end: events are written to its viewers until either side has gone.
"""

import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol
from urllib.parse import parse_qsl, unquote

import msgspec
from msgspec import Struct

from gpuyard.errors import UserError

MAX_HEAD_BYTES = 64 * 1024
MAX_BODY_BYTES = 64 * 1024 * 1024
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_REQUEST_LINE = re.compile(r"([A-Z]{1,16}) (/[!-~]*) HTTP/1\.([01])")
_CLOSE = "Connection: close\r\n"
# Of a head, in their order.
Fields = tuple[tuple[str, str], ...]
_PHRASES = {status.value: status.phrase for status in HTTPStatus}


class HttpError(UserError):
    """A request that is answered with this status."""

    def __init__(self, status: int, message: str, *, hint: str | None = None, headers: Fields = ()) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.headers = headers


class Request(Struct, frozen=True, kw_only=True):
    method: str
    path: str
    query: dict[str, str] = {}
    body: bytes = b""
    headers: dict[str, str] = {}  # by their names in small letters


class Response(Struct, frozen=True, kw_only=True):
    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    headers: Fields = ()
    is_last: bool = False  # whether the connection ends with it


class StreamClient(Protocol):
    """Whoever reads a stream."""

    def send(self, data: bytes) -> None:
        """Does not wait: a viewer that has stopped reading is let go."""
        ...

    def end(self) -> None:
        """There is nothing more to come; what was sent is still to be read."""
        ...


class ResponseStream(Struct, frozen=True, kw_only=True):
    """`begin` is called once the head is sent, and what it returns when the viewer has gone."""

    begin: Callable[[StreamClient], Callable[[], None]]
    content_type: str = "text/event-stream"
    headers: Fields = ()


class _Head(Struct, frozen=True):
    method: str
    target: str
    length: int
    is_last: bool
    awaits_consent: bool
    headers: dict[str, str]


class Parser:
    """What one connection has sent: `feed` it, and `take` whole requests out, in order."""

    def __init__(self, most_bytes: int = MAX_BODY_BYTES) -> None:
        self._most_bytes = most_bytes
        self._unread = bytearray()
        self._head: _Head | None = None
        self.is_last = False  # whether the request last taken asked to close the connection

    def feed(self, data: bytes) -> None:
        self._unread += data

    def take(self) -> Request | None:
        """The next request, `None` where it is not whole yet; `Refused` where nothing can come of it."""
        if self._head is None:
            self._head = self._take_head()
        head = self._head
        if head is None or len(self._unread) < head.length:
            return None
        body = bytes(self._unread[: head.length]) if head.length else b""
        del self._unread[: head.length]
        self._head, self.is_last = None, head.is_last
        path, query = _read_target(head.target)
        return Request(method=head.method, path=path, query=query, body=body, headers=head.headers)

    @property
    def is_amid_request(self) -> bool:
        return self._head is not None or bool(self._unread)

    @property
    def awaited(self) -> Request | None:
        """The request whose body has not all come, without it."""
        if self._head is None:
            return None
        path, query = _read_target(self._head.target)
        return Request(method=self._head.method, path=path, query=query, headers=self._head.headers)

    @property
    def awaits_consent(self) -> bool:
        """Whether the client holds its body back until it is told to go on, as curl does with a long one."""
        return self._head is not None and self._head.awaits_consent and not self._unread

    @property
    def unread_bytes(self) -> int:
        return len(self._unread)

    def _take_head(self) -> _Head | None:
        unread = self._unread
        while unread.startswith(b"\r\n"):
            del unread[:2]
        end = unread.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
        if end < 0:
            _refuse_hopeless(unread)
            return None
        text = unread[:end].decode("latin-1")
        del unread[: end + 4]
        return _read_head(text, self._most_bytes)


def render(response: Response, *, is_last: bool, has_body: bool = True, fields: Fields = ()) -> bytes:
    """The answer to HEAD has no body, but says how long it would be. Its own headers go before `fields`."""
    head = (
        f"HTTP/1.1 {response.status} {_PHRASES.get(response.status, 'Other')}\r\n"
        f"Content-Type: {response.content_type}\r\n"
        f"Content-Length: {len(response.body)}\r\n"
        f"{_fields(response.headers, fields)}{_CLOSE if is_last else ''}\r\n"
    ).encode("latin-1")
    return head + response.body if has_body else head


def render_head(stream: ResponseStream, fields: Fields = ()) -> bytes:
    """It ends when the connection does."""
    headers = (("Cache-Control", "no-store"), *stream.headers)
    return (f"HTTP/1.1 200 OK\r\nContent-Type: {stream.content_type}\r\n{_fields(headers, fields)}{_CLOSE}\r\n").encode(
        "latin-1"
    )


def _fields(own: Fields, others: Fields) -> str:
    if not own and not others:
        return ""
    named = {name for name, _ in own}
    return "".join(f"{name}: {value}\r\n" for name, value in (*own, *(f for f in others if f[0] not in named)))


def error_response(status: int, message: str, hint: str | None = None, headers: Fields = ()) -> Response:
    said = {"error": _printable(message), "hint": hint and _printable(hint)}
    return Response(status=status, body=msgspec.json.encode(said), headers=headers)


def _printable(text: str) -> str:
    """A path that is not UTF-8 must not turn an error into another one."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _refuse_hopeless(unread: bytearray) -> None:
    """Whoever speaks something else is told so at once, and not when its time is up."""
    if len(unread) >= MAX_HEAD_BYTES:
        raise HttpError(413, "the head of the request is over 64 KiB")
    if unread == b"\r":  # half of an empty line, which is harmless
        return
    if unread and not 65 <= unread[0] <= 90:
        raise _not_http()
    line, newline, _ = unread[:MAX_HEAD_BYTES].partition(b"\n")
    if newline:
        _read_request_line(line.decode("latin-1").removesuffix("\r") if line.endswith(b"\r") else "")


def _not_http() -> HttpError:
    return HttpError(400, "this is no HTTP/1.1 request", hint="try: curl --unix-socket PATH http://localhost/…")


def _read_request_line(line: str) -> tuple[str, str, bool]:
    """Method, target, and whether the client is one of those that close after each request."""
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise _not_http()
    method, target, minor = match.groups()
    return method, target, minor == "0"


def _read_head(text: str, most_bytes: int) -> _Head:
    line, *lines = text.split("\r\n")
    method, target, is_last = _read_request_line(line)
    length: int | None = None
    awaits_consent = False
    headers: dict[str, str] = {}
    for field in lines:
        name, value = _read_field(field)
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
        if name == "content-length":
            length = _read_length(value, length, most_bytes)
        elif name == "transfer-encoding":
            raise HttpError(411, "a body in chunks is not understood", hint="send its length with Content-Length")
        elif name == "connection":
            is_last = is_last or "close" in value.lower()
        elif name == "expect":
            awaits_consent = value.lower() == "100-continue"
    return _Head(method, target, length or 0, is_last, awaits_consent, headers)


def _read_field(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon or not name or name.split() != [name]:
        raise HttpError(400, f"the head of the request has a line that is no field: {line[:60]!r}")
    return name.lower(), value.strip()


def _read_length(value: str, before: int | None, most_bytes: int) -> int:
    if before is not None or not (value.isascii() and value.isdecimal()):
        raise HttpError(400, f"the request's Content-Length cannot be read: {value[:60]!r}")
    if len(value) > 18 or int(value) > most_bytes:
        raise HttpError(413, f"the body of the request is over {most_bytes // 1_048_576} MiB", hint="send it in parts")
    return int(value)


def _read_target(target: str) -> tuple[str, dict[str, str]]:
    path, question, query = target.partition("?")
    if "%" in path:
        path = unquote(path)
    return path, dict(parse_qsl(query, keep_blank_values=True)) if question else {}
