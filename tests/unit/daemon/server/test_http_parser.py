"""The parser against h11: every request that the daemon's parser accepts, h11 accepts with the same content.

The daemon's parser is looser in two places only, both handled in `as_h11_expects`:
- Empty lines before a request are skipped, as RFC 9112, 2.2 recommends.
- HTTP/1.1 requests need no Host header: it means nothing on a unix socket. The web page's access rules demand it.

Where it is stricter is listed in STRICTER, with the reason.
"""

from typing import NamedTuple

import h11
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuyard.daemon.server.http_parser import HttpError, Parser

REQUEST_LINES = [
    b"GET / HTTP/1.1", b"POST /v1/jobs?x=%20&y HTTP/1.1", b"HEAD /a HTTP/1.0", b"OPTIONS * HTTP/1.1", b"get / HTTP/1.1",
    b"GET http://x/ HTTP/1.1", b"GET  / HTTP/1.1", b"GET / HTTP/1.1 ", b"GET / HTTP/2.0", b"GET /\x80 HTTP/1.1",
    b"GET /", b"CONNECT /x HTTP/1.1", b" GET / HTTP/1.1", b"", b"GET /\tx HTTP/1.1", b"GET /# HTTP/1.1",
]  # fmt: skip
HEADER_LINES = [
    b"Host: x", b"Host: x", b"Host: y", b"Host:", b"Content-Length: 0", b"Content-Length: 3", b"content-length:3",
    b"Content-Length: +3", b"Content-Length: 3, 3", b"Content-Length: 0x3", b"Content-Length: \xb2", b"Content-Length:",
    b"Content-Length: 99999999999999999999999", b"Content-Length : 3", b"Content-Length: 3\x0b", b"Content-Length: 1 1",
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity", b"Transfer-Encoding : chunked", b"Connection: close",
    b"Connection: closet", b"Connection: keep-alive , CLOSE", b"Expect: 100-continue", b"X: a\tb", b"X:\xa0y\xa0",
    b"X\x00: y", b"X: a\x00", b"X: a\rb", b"X: a\nContent-Length: 3", b" folded", b"\tfolded", b"no header", b": empty",
    b"X:y:z", b"", b"Upgrade: websocket", b"X-\xe4: y", b"X: \xe4", b"\x85X: y", b"X: \x1cy",
]  # fmt: skip


class Parsed(NamedTuple):
    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    rest: int  # bytes after the request


def newlines() -> st.SearchStrategy[bytes]:
    return st.sampled_from([b"\r\n"] * 12 + [b"\n", b"\r", b"\r\r\n"])


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """Requests with a few mistakes, which are more telling than random bytes."""
    lines = [draw(st.sampled_from(REQUEST_LINES)), *draw(st.lists(st.sampled_from(HEADER_LINES), max_size=4))]
    head = b"".join(line + draw(newlines()) for line in lines)
    before = draw(st.sampled_from([b""] * 4 + [b"\r\n", b"\n", b"\r\n\r\n"]))
    after = draw(st.sampled_from([b"", b"abc", b"abcGET / HTTP/1.1\r\n"]))
    message = bytearray(before + head + draw(newlines()) + after)
    for _ in range(draw(st.integers(0, 2)) if message else 0):
        message[draw(st.integers(0, len(message) - 1))] = draw(st.integers(0, 255))
    return bytes(message)


def parse(message: bytes) -> tuple[Parsed, bool] | None:
    """Return the first request and whether the connection ends with it; None if it is rejected or incomplete."""
    parser = Parser()
    parser.feed(message)
    try:
        request = parser.take()
    except HttpError:
        return None
    if request is None:
        return None
    target = message.lstrip(b"\r\n").split(b" ", 2)[1].decode("latin-1")
    found = Parsed(request.method, target, request.headers, request.body, len(parser.buffer))
    return found, parser.is_last


def as_h11_expects(message: bytes, *, needs_host: bool) -> bytes:
    while message.startswith(b"\r\n"):
        message = message[2:]
    line, newline, rest = message.partition(b"\r\n")
    return line + newline + b"Host: added\r\n" + rest if needs_host and line.endswith(b"1.1") else message


def parse_with_h11(message: bytes) -> tuple[Parsed, bool]:
    """Return the first request and whether the connection ends with it. Raise RemoteProtocolError if h11 rejects it."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(message)
    request, body = connection.next_event(), b""
    assert isinstance(request, h11.Request), request
    while isinstance(event := connection.next_event(), h11.Data):
        body += bytes(event.data)
    assert isinstance(event, h11.EndOfMessage), event
    headers: dict[str, str] = {}
    for raw_name, raw_value in request.headers:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    parsed = Parsed(
        request.method.decode(), request.target.decode("latin-1"), headers, body, len(connection.trailing_data[0])
    )
    tokens = [token.strip() for token in headers.get("connection", "").lower().split(",")]
    return parsed, request.http_version < b"1.1" or "close" in tokens


@given(st.one_of(messages(), st.binary(max_size=200)))
@example(b"GET / HTTP/1.1\r\n\r\n")
@example(b"\r\nPOST /a%20b?c=d HTTP/1.0\r\nContent-Length: 3\r\nX: a\r\nx: b\r\n\r\nabcdef")
@example(b"GET / HTTP/1.1\r\nConnection: a, Close\r\n\r\n")
def test_h11_reads_every_accepted_request_the_same_way(message: bytes) -> None:
    accepted = parse(message)
    if accepted is None:
        return
    request, is_last = accepted
    needs_host = "host" not in request.headers
    theirs, closes = parse_with_h11(as_h11_expects(message, needs_host=needs_host))
    if theirs.headers.get("host") == "added":
        del theirs.headers["host"]
    assert (request, is_last) == (theirs, closes)


tokens = st.text("abcXYZ019-_!#$%&'*+.^`|~", min_size=1, max_size=8).filter(
    lambda name: name.lower() not in ("host", "connection", "expect", "te", "upgrade")
)
values = st.text(st.characters(min_codepoint=0x21, max_codepoint=0xFF, exclude_characters="\x7f"), max_size=8)


@given(
    st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE"]),
    st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=20),
    st.lists(st.tuples(tokens, values), max_size=4),
    st.binary(max_size=20),
)
def test_both_accept_every_well_formed_request(
    method: str, path: str, headers: list[tuple[str, str]], body: bytes
) -> None:
    lines = [f"{method} /{path} HTTP/1.1", "Host: x", *(f"{name}: {value}" for name, value in headers)]
    message = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode("latin-1") + body + b"next"
    accepted = parse(message)
    assert accepted == parse_with_h11(message)
    assert accepted is not None
    assert (accepted[0].body, accepted[0].rest) == (body, 4)


STRICTER = {
    "a bare LF ends no line, as RFC 9112 allows": b"GET / HTTP/1.1\nHost: x\n\n",
    "obsolete line folding, which RFC 9112 tells servers to reject": b"GET / HTTP/1.1\r\nHost: x\r\nX: a\r\n b\r\n\r\n",
    "a repeated Content-Length, even an equal one": (
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nContent-Length: 0\r\n\r\n"
    ),
    "Content-Length as a list": b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 0, 0\r\n\r\n",
    "chunked bodies: no client of the daemon sends one": (
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    ),
    "targets that are no path: the daemon is no proxy": b"GET http://x/ HTTP/1.1\r\nHost: x\r\n\r\n",
    "methods that are not upper-case letters: no route has one": b"get / HTTP/1.1\r\nHost: x\r\n\r\n",
    "control characters in a value, which RFC 9110 forbids": b"GET / HTTP/1.1\r\nHost: x\r\nX: a\x01\r\n\r\n",
}


@pytest.mark.parametrize("message", STRICTER.values(), ids=STRICTER.keys())
def test_requests_that_h11_accepts_and_the_daemon_rejects(message: bytes) -> None:
    assert parse_with_h11(message)
    parser = Parser()
    parser.feed(message)
    with pytest.raises(HttpError):
        parser.take()
