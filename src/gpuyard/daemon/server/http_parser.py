"""The part of HTTP/1.1 that the daemon needs: parse requests, render responses. No sockets, no clock.

Rules:
- A request that two parsers could read differently is rejected: chunked bodies, a repeated Content-Length, lines that
  are not header fields. A property test compares the parser with h11, which costs ten times as much per request.
- Every rejection is answered in JSON, `{"error": …, "hint": …}`, as all errors of the daemon are.
- A head has at most 64 KiB; a body has at most 64 MiB, or the smaller limit given to the parser.
- A stream is a response without a length: its events are written until the client or the daemon closes the connection.
"""

import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol
from urllib.parse import parse_qsl, unquote

import msgspec
from msgspec import Struct

from gpuyard.errors import UserError
from gpuyard.schema.queue import ErrorBody

MAX_HEAD_BYTES = 64 * 1024
MAX_BODY_BYTES = 64 * 1024 * 1024
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

# Names and values, in the order in which they are sent.
Headers = tuple[tuple[str, str], ...]

_REQUEST_LINE = re.compile(r"([A-Z]{1,16}) (/[!-~]*) HTTP/1\.([01])")
# A token, and a value without control characters other than tab (RFC 9110, 5.1 and 5.5).
_HEADER_LINE = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\x00-\x08\x0a-\x1f\x7f]*)")
_COMMA = re.compile(r"[ \t]*,[ \t]*")
_CLOSE = "Connection: close\r\n"
_PHRASES = {status.value: status.phrase for status in HTTPStatus}


# The error code of each status; others have "usage".
_CODES = {
    401: "denied", 403: "denied", 404: "not_found", 408: "timeout", 409: "conflict", 412: "version", 413: "too_large",
    422: "impossible", 429: "rate_limited", 500: "internal", 503: "unavailable",
}  # fmt: skip


class HttpError(UserError):
    """An error with the status code of its response."""

    def __init__(self, status: int, message: str, *, hint: str | None = None, headers: Headers = ()) -> None:
        super().__init__(message, hint=hint, code=_CODES.get(status))
        self.status = status
        self.headers = headers


class Request(Struct, frozen=True, kw_only=True):
    method: str
    path: str
    query: dict[str, str] = {}
    body: bytes = b""
    headers: dict[str, str] = {}  # names are lower case; values of a repeated header are joined with a comma


class Response(Struct, frozen=True, kw_only=True):
    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    headers: Headers = ()
    is_last: bool = False  # the connection is closed after it


class StreamClient(Protocol):
    """The reading end of a stream."""

    def send(self, data: bytes) -> None:
        """Write without waiting. A client that has stopped reading is disconnected."""
        ...

    def end(self) -> None:
        """Close the connection once the client has read what was sent."""
        ...


class ResponseStream(Struct, frozen=True, kw_only=True):
    """A response without an end.

    `start` is called when the head has been sent; it returns a function that is called when the client has gone.
    """

    start: Callable[[StreamClient], Callable[[], object]]
    content_type: str = "text/event-stream"
    headers: Headers = ()


class _Head(Struct, frozen=True, kw_only=True):
    request: Request  # without its body
    body_bytes: int
    is_last: bool
    expects_continue: (
        bool  # the client waits for `100 Continue` before it sends the body, as curl does with a large one
    )


class Parser:
    """Parse the requests of one connection: `feed` it bytes, `take` complete requests out in order."""

    def __init__(self, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._max_body_bytes = max_body_bytes
        self.buffer = bytearray()  # what has arrived behind the head, or behind the last request
        self.head: _Head | None = None  # of the request whose body has not arrived yet
        self.is_last = False  # whether the client wants the connection closed after the request last taken

    def feed(self, data: bytes) -> None:
        self.buffer += data

    def take(self) -> Request | None:
        """Return the next request, or None while it is incomplete. Raise HttpError if it is invalid or too large."""
        if self.head is None:
            self.head = self._take_head()
        head = self.head
        if head is None or len(self.buffer) < head.body_bytes:
            return None
        self.head, self.is_last = None, head.is_last
        if not head.body_bytes:
            return head.request
        body = bytes(self.buffer[: head.body_bytes])
        del self.buffer[: head.body_bytes]
        return msgspec.structs.replace(head.request, body=body)

    def _take_head(self) -> _Head | None:
        buffer = self.buffer
        while buffer.startswith(b"\r\n"):
            del buffer[:2]
        end = buffer.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
        if end < 0:
            _reject_early(buffer)
            return None
        text = buffer[:end].decode("latin-1")
        del buffer[: end + 4]
        return _parse_head(text, self._max_body_bytes)


def render(response: Response, *, is_last: bool, has_body: bool = True, common_headers: Headers = ()) -> bytes:
    """Return the response as bytes. Without `has_body` (a response to HEAD) Content-Length still gives the full length.

    A header of the response replaces the one of the same name in `common_headers`.
    """
    head = (
        f"HTTP/1.1 {response.status} {_PHRASES.get(response.status, 'Other')}\r\n"
        f"Content-Type: {response.content_type}\r\n"
        f"Content-Length: {len(response.body)}\r\n"
        f"{_header_lines(response.headers, common_headers)}{_CLOSE if is_last else ''}\r\n"
    ).encode("latin-1")
    return head + response.body if has_body else head


def render_stream_head(stream: ResponseStream, common_headers: Headers = ()) -> bytes:
    lines = _header_lines((("Cache-Control", "no-store"), *stream.headers), common_headers)
    return f"HTTP/1.1 200 OK\r\nContent-Type: {stream.content_type}\r\n{lines}{_CLOSE}\r\n".encode("latin-1")


def _header_lines(own: Headers, common: Headers) -> str:
    names = {name for name, _ in own}
    return "".join(f"{name}: {value}\r\n" for name, value in (*own, *(item for item in common if item[0] not in names)))


def error_response(
    status: int, message: str, hint: str | None = None, headers: Headers = (), code: str | None = None
) -> Response:
    body = ErrorBody(
        error=_replace_surrogates(message),
        hint=hint and _replace_surrogates(hint),
        code=code or _CODES.get(status, "usage"),
    )
    return Response(status=status, body=msgspec.json.encode(body), headers=headers)


def _replace_surrogates(text: str) -> str:
    """A path that is not UTF-8 decodes to surrogates, which JSON cannot encode."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _reject_early(buffer: bytearray) -> None:
    """Reject what cannot become a request now, rather than when the client's time is up."""
    if len(buffer) >= MAX_HEAD_BYTES:
        raise HttpError(413, "the head of the request is over 64 KiB")
    if buffer == b"\r":  # the first half of an empty line
        return
    if buffer and not 65 <= buffer[0] <= 90:
        raise _not_http()
    line, newline, _ = buffer.partition(b"\n")
    if newline:
        _match_request_line(line.decode("latin-1").removesuffix("\r") if line.endswith(b"\r") else "")


def _not_http() -> HttpError:
    return HttpError(400, "this is not an HTTP/1.1 request", hint="try: curl --unix-socket PATH http://localhost/…")


def _match_request_line(line: str) -> tuple[str, str, bool]:
    """Return the method, the target, and whether the version is 1.0."""
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise _not_http()
    method, target, minor = match.groups()
    return method, target, minor == "0"


def _parse_head(text: str, max_body_bytes: int) -> _Head:
    line, *lines = text.split("\r\n")
    method, target, is_old = _match_request_line(line)
    headers = _parse_headers(lines)
    if "transfer-encoding" in headers:
        raise HttpError(411, "chunked bodies are not supported", hint="send the length in Content-Length")
    path, question, query = target.partition("?")
    request = Request(
        method=method,
        path=unquote(path) if "%" in path else path,
        query=dict(parse_qsl(query, keep_blank_values=True)) if question else {},
        headers=headers,
    )
    return _Head(
        request=request,
        body_bytes=_parse_length(headers.get("content-length", "0"), max_body_bytes),
        is_last=is_old or "close" in _COMMA.split(headers.get("connection", "").lower()),
        expects_continue=not is_old and headers.get("expect", "").lower() == "100-continue",
    )


def _parse_headers(lines: list[str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        match = _HEADER_LINE.fullmatch(line)
        if match is None:
            raise HttpError(400, f"the request has a line that is not a header: {line[:60]!r}")
        name, value = match[1].lower(), match[2].strip(" \t")
        if name not in headers:
            headers[name] = value
        elif name == "host":
            raise HttpError(400, "the request has more than one Host header")
        else:
            headers[name] += f", {value}"
    return headers


def _parse_length(value: str, max_bytes: int) -> int:
    """A repeated Content-Length arrives here as a list, which is no number and is rejected."""
    if not (value.isascii() and value.isdecimal()):
        raise HttpError(400, f"the Content-Length of the request is not a number: {value[:60]!r}")
    if len(value) > 18 or int(value) > max_bytes:
        raise HttpError(
            413, f"the body of the request is over {max_bytes // 1_048_576} MiB", hint="split it into several requests"
        )
    return int(value)
