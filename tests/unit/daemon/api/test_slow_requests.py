"""A request that is done in pieces: others are served between two pieces."""

import asyncio
from pathlib import Path

from gpuyard.daemon.api.slow_requests import run_in_pieces
from gpuyard.daemon.server.connection import serve
from gpuyard.daemon.server.http_messages import Request, Response
from gpuyard.queue.add_submission import InPieces


def test_a_new_client_is_answered_within_one_piece(tmp_path: Path) -> None:
    asyncio.run(_ask_meanwhile(tmp_path / "socket"))


async def write_at_once() -> None:
    return


async def _ask_meanwhile(path: Path) -> None:
    pieces_done: list[int] = []
    answered_after: list[int] = []
    has_asked = asyncio.Event()

    def pieces() -> InPieces[str]:
        for number in range(500):
            pieces_done.append(number)
            yield
        return "done"

    async def handle(request: Request) -> Response:
        answered_after.append(len(pieces_done))
        return Response()

    server = await serve(path, handle)

    async def ask() -> None:
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(b"GET /v1/status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        pieces_done.clear()
        has_asked.set()
        await reader.read()
        writer.close()

    client = asyncio.ensure_future(ask())
    await has_asked.wait()
    try:
        assert await run_in_pieces(pieces(), write_at_once) == "done"
        await client
    finally:
        server.close()
    assert len(answered_after) == 1
    assert answered_after[0] == 1  # of 500
