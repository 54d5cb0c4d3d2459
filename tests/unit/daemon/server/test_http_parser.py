"""What the daemon refuses or limits beyond what h11 does, and that it never fails on what others send."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.daemon.server.http_messages import HttpError, Request, RequestReader

GET = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /b%20c?x=1 HTTP/1.1\r\nHost: x\r\nX: 1\r\nX: 2\r\nContent-Length: 7\r\n\r\nGET / x"
CHUNKED = b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
LAST = b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@given(st.lists(st.integers(1, 90)))
def test_requests_are_parsed_the_same_however_their_bytes_are_split(sizes: list[int]) -> None:
    reader, taken, rest = RequestReader(), [], GET + POST + CHUNKED + LAST
    for size in [*sizes, len(rest)]:
        if rest:
            reader.feed(rest[:size])
        rest = rest[size:]
        while (request := reader.take()) is not None:
            taken.append(request)
    chunked = {"host": "x", "transfer-encoding": "chunked"}
    posted = {"host": "x", "x": "1, 2", "content-length": "7"}
    assert taken == [
        Request(method="GET", path="/a", headers={"host": "x"}),
        Request(method="POST", path="/b c", query={"x": "1"}, body=b"GET / x", headers=posted),
        Request(method="POST", path="/c", body=b"hello", headers=chunked),
        Request(method="GET", path="/last", headers={"host": "x", "connection": "close"}),
    ]
    assert reader.is_last
    assert reader.head is None
    assert not reader.unread


@given(st.one_of(st.binary(max_size=200), st.binary(max_size=60).map(lambda body: POST[:-7] + body + GET)))
def test_no_bytes_cause_another_error_than_a_refusal(message: bytes) -> None:
    reader = RequestReader()
    with contextlib.suppress(HttpError):
        reader.feed(message or b"\r")
        while reader.take() is not None:
            pass


@pytest.mark.parametrize(
    ("message", "status"),
    [
        (b"GET http://x/ HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 11\r\n\r\n", 413),
        (CHUNKED.replace(b"5\r\nhello", b"b\r\nhello world"), 413),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 70_000, 413),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 70_000 + b"\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a:\r\n" * 1_000 + b"\r\n", 413),
    ],
)
def test_a_request_that_no_handler_may_get_is_refused(message: bytes, status: int) -> None:
    reader = RequestReader(max_body_bytes=10)
    reader.feed(message)
    with pytest.raises(HttpError) as refused:
        reader.take()
    assert refused.value.status == status
