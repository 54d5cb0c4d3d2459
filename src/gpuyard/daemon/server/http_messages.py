"""HTTP/1.1 messages: requests as h11 parses them and the routes that they ask for; responses, also to a request whose
handler raised an exception.

- Every rejection is answered in JSON, `{"error": …, "hint": …}`, as all errors of the daemon are.
- A head has at most 64 KiB; a body has at most 64 MiB, or the smaller limit given to the reader.
- A stream is a response without a length: its events are written until the client or the daemon closes the
  connection.
"""

import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus
from typing import Protocol
from urllib.parse import parse_qsl, unquote

import h11
import msgspec
from msgspec import Struct

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.schema.queue import ErrorBody
from gpuyard.system.system_limits import passing_limit, remedy_of
from gpuyard.version import API

MAX_HEAD_BYTES = 64 * 1024
MAX_BODY_BYTES = 64 * 1024 * 1024
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

# Names and values, in the order in which they are sent.
Headers = tuple[tuple[str, str], ...]

_CLOSE = ("Connection", "close")
# The error code of each status; others have "usage".
CODE_OF = {
    401: "denied", 403: "denied", 404: "not_found", 408: "timeout", 409: "conflict", 412: "version", 413: "too_large",
    422: "impossible", 429: "rate_limited", 500: "internal", 503: "unavailable",
}  # fmt: skip


class HttpError(UserError):
    """An error with the status code of its response."""

    def __init__(self, status: int, message: str, *, hint: str | None = None, headers: Headers = ()) -> None:
        super().__init__(message, hint=hint, code=CODE_OF.get(status))
        self.status, self.headers = status, headers


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

    def end(self) -> None:
        """Close the connection once the client has read what was sent."""


class ResponseStream(Struct, frozen=True, kw_only=True):
    """A response without an end. `start` is called when the head has been sent; it returns what is called when the
    client has gone."""

    start: Callable[[StreamClient], Callable[[], object]]
    content_type: str = "text/event-stream"


class RequestReader:
    """Reads the requests of one connection: `feed` it bytes, `take` complete requests out in order."""

    head: Request | None  # of the request whose body has not arrived yet

    def __init__(self, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._max_body_bytes = max_body_bytes
        self.is_last = False  # whether the client wants the connection closed after the request last taken
        self._expect_next()

    def feed(self, data: bytes) -> None:
        self._parser.receive_data(data)

    def take(self) -> Request | None:
        """Return the next request, or None if it has not arrived completely. Raise HttpError for a wrong one."""
        try:
            while True:
                if self.head is None:
                    self._check_head()
                event = self._parser.next_event()
                if isinstance(event, h11.Request):
                    self.head = self._read_head(event)
                elif isinstance(event, h11.Data):
                    self._body += event.data
                    self._check_length(len(self._body))
                elif isinstance(event, h11.EndOfMessage) and self.head is not None:
                    request = msgspec.structs.replace(self.head, body=bytes(self._body))
                    self.is_last = self._parser.their_state is h11.MUST_CLOSE
                    self._expect_next(self.unread)
                    return request
                else:
                    return None
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
                raise HttpError(413, "the head of the request is over 64 KiB") from error
            raise _not_http(str(error)) from error

    @property
    def unread(self) -> bytes:
        """What has arrived and belongs to no request that was taken."""
        return self._parser.trailing_data[0]

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for `100 Continue` before it sends the body, as curl does with a large one."""
        return self._parser.they_are_waiting_for_100_continue

    def _expect_next(self, arrived: bytes = b"") -> None:
        self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self.head = None
        self._body = bytearray()
        if arrived:
            self.feed(arrived)

    def _read_head(self, head: h11.Request) -> Request:
        path, _, query = head.target.decode("latin-1").partition("?")
        if not path.startswith("/"):
            raise _not_http("the target is no path")
        headers: dict[str, str] = {}
        for raw_name, raw_value in head.headers:
            name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        self._check_length(int(headers.get("content-length", "0")))
        return Request(
            method=head.method.decode("latin-1"),
            path=unquote(path) if "%" in path else path,
            query=dict(parse_qsl(query, keep_blank_values=True)),
            headers=headers,
        )

    def _check_head(self) -> None:
        """Refuse a head that would take long to parse. h11 itself limits only one that has not arrived completely."""
        head, blank_line, _ = self.unread[:MAX_HEAD_BYTES].replace(b"\r\n", b"\n").partition(b"\n\n")
        if not blank_line and len(self.unread) > MAX_HEAD_BYTES:
            raise HttpError(413, "the head of the request is over 64 KiB")
        if head.count(b"\n") > 200:
            raise HttpError(413, "the head of the request has over 200 lines")

    def _check_length(self, count: int) -> None:
        if count > self._max_body_bytes:
            message = f"the body of the request is over {self._max_body_bytes // 1_048_576} MiB"
            raise HttpError(413, message, hint="split it into several requests")


def _not_http(problem: str) -> HttpError:
    message = f"this is not an HTTP/1.1 request: {problem[:100]}"
    return HttpError(400, message, hint="try: curl --unix-socket PATH http://localhost/…")


def render(response: Response, *, is_last: bool, has_body: bool = True, common_headers: Headers = ()) -> bytes:
    """Return the response as bytes. Without `has_body` (a response to HEAD) Content-Length still gives the full length.
    A header of the response replaces the one of the same name in `common_headers`."""
    length = ("Content-Length", str(len(response.body)))
    own = (("Content-Type", response.content_type), length, *response.headers, *((_CLOSE,) if is_last else ()))
    return _render_head(response.status, own, common_headers) + (response.body if has_body else b"")


def render_stream_head(stream: ResponseStream, common_headers: Headers = ()) -> bytes:
    own = (("Content-Type", stream.content_type), ("Cache-Control", "no-store"), _CLOSE)
    return _render_head(200, own, common_headers)


def _render_head(status: int, own: Headers, common: Headers) -> bytes:
    headers = {**dict(common), **dict(own)}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{lines}\r\n".encode("latin-1")


def error_response(
    status: int, message: str, hint: str | None = None, headers: Headers = (), code: str | None = None
) -> Response:
    # A path that is not UTF-8 decodes to surrogates, which JSON cannot encode.
    texts = [text and text.encode("utf-8", "replace").decode() for text in (message, hint)]
    body = ErrorBody(error=texts[0] or "", hint=texts[1], code=code or CODE_OF.get(status, "usage"))
    return Response(status=status, body=msgspec.json.encode(body), headers=headers)


_log = logging.getLogger(__name__)
_STATUS_OF = {code: status for status, code in CODE_OF.items()}


def failure(request: Request, error: BaseException) -> Response:
    """Return the response to a request whose handler raised `error`."""
    if isinstance(error, HttpError):
        return error_response(error.status, error.message, error.hint, error.headers)
    if isinstance(error, UserError):
        return error_response(_STATUS_OF.get(error.code, 400), error.message, error.hint, code=error.code)
    if isinstance(error, EnvironmentFault):
        return error_response(503, error.message, error.hint, code=error.code)
    limit = passing_limit(error)
    if limit is not None:
        message = f"the daemon cannot answer {request.method} {request.path} now: {limit.strerror}"
        return error_response(503, message, remedy_of(limit), code=EnvironmentFault.code)
    _log.error("%s %s failed", request.method, request.path, exc_info=error)
    message = f"the daemon failed at {request.method} {request.path}: {type(error).__name__}: {error}"
    return error_response(500, message, "this is a bug in gpuyard; see daemon.log")


EVENTS = "/events"
# A method, and a path that may contain numbers, as in `/jobs/{id}/why`.
RouteKey = tuple[str, str]
# Called with the numbers in the path, then with the decoded query or body if the operation has one.
Route = Callable[..., Struct | Awaitable[Struct]]
_NUMBER = r"([1-9][0-9]{0,17})"


class Router:
    def __init__(self, routes: Iterable[RouteKey]) -> None:
        self._routes = set(routes)
        paths = {path for _, path in self._routes if "{" in path}
        self._patterns = {path: re.compile(re.sub(r"\{\w+\}", _NUMBER, path)) for path in paths}

    def find(self, request: Request) -> tuple[RouteKey, list[int]]:
        """Return the route and the numbers in the path. Raise 404 for an unknown path, 405 for another method."""
        method, path = "GET" if request.method == "HEAD" else request.method, request.path
        if (method, path) in self._routes:
            return (method, path), []
        for template, pattern in self._patterns.items():
            if (match := pattern.fullmatch(path)) is not None:
                path = template
                if (method, path) in self._routes:
                    return (method, path), [int(number) for number in match.groups()]
                break
        hint = "see /openapi.json"
        if known := sorted(method for method, known in self._routes if known == path):
            message = f"{request.path} takes {' and '.join(known)}, not {request.method}"
            raise HttpError(405, message, hint=hint, headers=(("Allow", ", ".join(known)),))
        raise HttpError(404, f"there is no {request.method} {request.path}", hint=hint)


def target_request(target: str) -> Request:
    """Return the GET request that a target of `/events` stands for, such as `/jobs?state=running`."""
    path, _, query = target.partition("?")
    if not path.startswith("/") or path == EVENTS:
        raise HttpError(400, f"'{target[:60]}' cannot be watched", hint="name routes that answer GET")
    return Request(method="GET", path=API + unquote(path), query=dict(parse_qsl(query, keep_blank_values=True)))
