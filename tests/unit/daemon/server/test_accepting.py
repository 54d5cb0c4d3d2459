"""Accepting clients: at the limit on open files, and many at once."""

import asyncio
import contextlib
import errno
import os
import socket
from pathlib import Path
from typing import Any

from gpuyard.daemon.server.connection import ConnectionLimits, Server, serve
from gpuyard.daemon.server.http_messages import Request, Response

CLIENTS = 200


async def ok(_: Request) -> Response:
    return Response(body=b"{}")


class AtTheLimit(socket.socket):
    """A listening socket of a process that can open no more files."""

    tries = 0

    def accept(self) -> tuple[socket.socket, Any]:
        self.tries += 1
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_without_free_descriptors_the_server_complains_once_and_waits(tmp_path: Path) -> None:
    """asyncio complained 512 times in a row, with a traceback each, and retried 512 times a second later."""
    complaints: list[dict[str, Any]] = []

    async def be_called() -> int:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        server = Server(ok, ConnectionLimits(), lambda _: None, lambda _: True)
        with AtTheLimit(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as client:
            listening.setblocking(False)
            listening.bind(str(tmp_path / "s"))
            await server.start(listening)
            client.connect(str(tmp_path / "s"))
            for _ in range(20):
                await asyncio.sleep(0)
            server.close()
        return listening.tries

    assert asyncio.run(be_called()) == 1
    assert len(complaints) == 1


def test_clients_that_connect_at_once_are_all_answered(tmp_path: Path) -> None:
    async def answer_all() -> list[bytes]:
        server = await serve(tmp_path / "s", ok)
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(CLIENTS)]
            for client in clients:
                client.setblocking(False)
                client.connect(str(tmp_path / "s"))  # fails if the queue of connections is full
                client.sendall(b"GET /v1/status HTTP/1.1\r\nHost: gpuyard\r\nContent-Length: 0\r\n\r\n")
            answers = [await loop.sock_recv(client, 100) for client in clients]
        server.close()
        return answers

    assert all(answer.startswith(b"HTTP/1.1 200") for answer in asyncio.run(answer_all()))
