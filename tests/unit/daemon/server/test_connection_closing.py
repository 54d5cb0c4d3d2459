"""A closed server handles no request, not even from a client that it accepted a moment before."""

import asyncio
import gc
import socket
import warnings
from pathlib import Path

import pytest

from gpuyard.daemon.server.connection import serve
from gpuyard.daemon.server.http_messages import Request, Response

REQUEST = b"GET /v1/status HTTP/1.1\r\nHost: gpuyard\r\nContent-Length: 0\r\n\r\n"


async def iterations(count: int) -> None:
    """Let the event loop run `count` iterations."""
    for _ in range(count):
        await asyncio.sleep(0)


# A connection takes about three iterations from its acceptance to its first request. In one of them asyncio fails
# on a listener that is closed, and leaves the connection to the garbage collector, which fails on it as well.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("iterations_before", range(8))
def test_no_request_is_handled_after_the_server_was_closed(tmp_path: Path, iterations_before: int) -> None:
    handled: list[bool] = []

    async def connect_and_close() -> None:
        is_closed = False

        async def handle(_: Request) -> Response:
            handled.append(is_closed)
            return Response(body=b"{}")

        server = await serve(tmp_path / "s", handle)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "s"))
            client.sendall(REQUEST)
            await iterations(iterations_before)
            server.close()
            is_closed = True
            await iterations(8)

    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        asyncio.run(connect_and_close())
        gc.collect()
    assert True not in handled
    assert iterations_before < 7 or handled == [False]
