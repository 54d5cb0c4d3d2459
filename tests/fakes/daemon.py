"""The daemon's socket with a handler of the test: in a thread, or as a program.

As a program it does what clients expect of a daemon that they start: it takes the lock, and serves until it is ended.

- SIGTERM ends it for good: when many were started at once, one may get the lock only after the test, and must not
  stay. After any other end the next one serves.
- The handling of all other signals is left as inherited, because a test checks it.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from gpuyard.client import paths
from gpuyard.client.daemon_liveness import hold_daemon_lock
from gpuyard.daemon.server.connection import ConnectionLimits, Handler, HttpAnswer, Server, serve
from gpuyard.daemon.server.http_messages import Request, Response
from gpuyard.errors import GpuyardError
from gpuyard.system import user_sockets
from gpuyard.version import API

# By path, because it is started in another working directory; -P, because the files beside it are not modules.
COMMAND = (sys.executable, "-P", str(Path(__file__).resolve()))
DEADLINE_S = 90.0
_POLL_S = 0.02


class Served(NamedTuple):
    """A server in a thread, and how a test reaches it."""

    path: Path
    server: Server
    loop: asyncio.AbstractEventLoop

    def dial(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(DEADLINE_S)
        try:
            user_sockets.reach(str(self.path), connection.connect)
        except OSError:
            connection.close()
            raise
        return connection

    def exchange(self, request: bytes) -> bytes:
        """Send `request` and return the answer until the server closes; our end stays open, as a client that waits."""
        with self.dial() as connection:
            connection.sendall(request)
            return receive_all(connection)

    def call(self, act: Callable[[], None]) -> None:
        """Call `act` in the server's thread, the only thread that may use the server."""

        async def acting() -> None:
            act()

        asyncio.run_coroutine_threadsafe(acting(), self.loop).result(DEADLINE_S)


def awaited(handler: Callable[[Request], HttpAnswer | Awaitable[HttpAnswer]]) -> Handler:
    """Return a handler that answers as this function does."""

    async def handle(request: Request) -> HttpAnswer:
        answer = handler(request)
        return await answer if isinstance(answer, Awaitable) else answer

    return handle


@contextlib.contextmanager
def served(
    path: Path,
    handler: Callable[[Request], HttpAnswer | Awaitable[HttpAnswer]] | None = None,
    limits: ConnectionLimits | None = None,
) -> Iterator[Served]:
    runner = asyncio.Runner()
    loop = runner.get_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        starting = serve(path, awaited(handler or echo), limits=limits)
        server = asyncio.run_coroutine_threadsafe(starting, loop).result(DEADLINE_S)
        running = Served(path, server, loop)
        try:
            yield running
        finally:
            running.call(server.close)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(DEADLINE_S)
        runner.close()  # which also lets cancelled handlers finish


def echo(request: Request) -> Response:
    """Answer with the request and the pid of this process."""
    answer = {
        "method": request.method,
        "path": request.path.removeprefix(API),
        "query": request.query,
        "body": request.body.decode(),
        "pid": os.getpid(),
    }
    return Response(body=msgspec.json.encode(answer))


def receive_all(connection: socket.socket) -> bytes:
    received = bytearray()
    while data := connection.recv(1 << 20):
        received += data
    return bytes(received)


def status_of(answer: bytes) -> int:
    """Return the status of the first response."""
    protocol, status, _ = answer.split(b" ", 2)
    assert protocol == b"HTTP/1.1", answer[:100]
    return int(status)


def body_of(answer: bytes) -> dict[str, object]:
    return msgspec.json.decode(answer.partition(b"\r\n\r\n")[2], type=dict[str, object])


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:g} s"
        time.sleep(_POLL_S)


def _echo_or_die(request: Request) -> Response:
    if request.path == f"{API}/die":
        os.kill(os.getpid(), signal.SIGKILL)
    return echo(request)


async def _serve_until_sigterm() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    server = await serve(paths.socket_path(), awaited(_echo_or_die))
    await stop.wait()
    server.close()


def _main() -> None:
    over = Path(paths.state_folder(), "over")
    try:
        with hold_daemon_lock(paths.lock_path()):
            if not over.exists():
                asyncio.run(_serve_until_sigterm())
                over.touch()
    except GpuyardError as error:
        sys.exit(error.message)


if __name__ == "__main__":
    _main()
