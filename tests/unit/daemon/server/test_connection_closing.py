"""A server that is closed serves nobody, not even a client that it accepted a moment before."""

import asyncio
import gc
import socket
import warnings
from pathlib import Path

import pytest

from gpuyard.daemon.server.connection import serve
from gpuyard.daemon.server.http_parser import Request, Response

REQUEST = b"GET /v1/status HTTP/1.1\r\nHost: gpuyard\r\nContent-Length: 0\r\n\r\n"


async def turns(count: int) -> None:
    """Let the loop go round so many times."""
    for _ in range(count):
        await asyncio.sleep(0)


# A connection takes about three turns from its acceptance to its first request. In one of them asyncio itself fails
# on a listener that is closed, and leaves the connection to the garbage collector, which fails on it as well.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("turns_before", range(8))
def test_no_request_is_handled_after_the_end(tmp_path: Path, turns_before: int) -> None:
    handled: list[bool] = []

    async def connect_and_close() -> None:
        is_closed = False

        def handle(_: Request) -> Response:
            handled.append(is_closed)
            return Response(body=b"{}")

        server = await serve(tmp_path / "s", handle)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "s"))
            client.sendall(REQUEST)
            await turns(turns_before)
            server.close()
            is_closed = True
            await turns(8)

    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        asyncio.run(connect_and_close())
        gc.collect()
    assert True not in handled
    assert turns_before < 7 or handled == [False]
