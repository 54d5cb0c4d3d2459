"""The daemon's socket with a handler of the test's own behind it: in a thread, or as a program to be started.

As a program it does what a daemon does for those who start one: it takes the lock, and serves until it is ended.

- SIGTERM ends it for good: of many that were started at once, one may come to the lock only when the test is over, and
  must not stay. After any other end the next one serves.
- All other signals are left as they were handed to it, because that is what a test looks at.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from gpuyard.connect import paths
from gpuyard.connect.daemon_lock import hold_daemon_lock
from gpuyard.daemon.server.connection import ConnectionLimits, Handler, Server, serve
from gpuyard.daemon.server.http_parser import Request, Response
from gpuyard.errors import GpuyardError
from gpuyard.version import API

# By its path, because it is started in another working directory; -P, because its neighbours are no top-level modules.
COMMAND = (sys.executable, "-P", str(Path(__file__).resolve()))
DEADLINE_S = 90.0
_POLL_S = 0.02


class Served(NamedTuple):
    """A server that runs in a thread, and the ways a test has to it."""

    path: Path
    server: Server
    loop: asyncio.AbstractEventLoop

    def dial(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(DEADLINE_S)
        try:
            paths.reach(str(self.path), connection.connect)
        except OSError:
            connection.close()
            raise
        return connection

    def say(self, told: bytes) -> bytes:
        """All that is answered until the server closes; our end stays open, as closing it would mean that we left."""
        with self.dial() as connection:
            connection.sendall(told)
            return hear_all(connection)

    def call(self, act: Callable[[], None]) -> None:
        """In the server's thread, where alone it may be touched."""

        async def acting() -> None:
            act()

        asyncio.run_coroutine_threadsafe(acting(), self.loop).result(DEADLINE_S)


@contextlib.contextmanager
def served(path: Path, handler: Handler | None = None, limits: ConnectionLimits | None = None) -> Iterator[Served]:
    runner = asyncio.Runner()
    loop = runner.get_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        starting = serve(path, handler or echo, limits=limits)
        server = asyncio.run_coroutine_threadsafe(starting, loop).result(DEADLINE_S)
        running = Served(path, server, loop)
        try:
            yield running
        finally:
            running.call(server.close)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(DEADLINE_S)
        runner.close()  # which also lets cancelled handlers come to their end


def echo(request: Request) -> Response:
    """Says what was asked, and who answers."""
    said = {
        "method": request.method,
        "path": request.path.removeprefix(API),
        "query": request.query,
        "body": request.body.decode(),
        "pid": os.getpid(),
    }
    return Response(body=msgspec.json.encode(said))


def hear_all(connection: socket.socket) -> bytes:
    heard = bytearray()
    while data := connection.recv(1 << 20):
        heard += data
    return bytes(heard)


def status_of(answer: bytes) -> int:
    """The first one's, where there are several."""
    protocol, status, _ = answer.split(b" ", 2)
    assert protocol == b"HTTP/1.1", answer[:100]
    return int(status)


def body_of(answer: bytes) -> dict[str, object]:
    return msgspec.json.decode(answer.partition(b"\r\n\r\n")[2], type=dict[str, object])


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, f"it was not so within {DEADLINE_S:g} s"
        time.sleep(_POLL_S)


def _echo_or_die(request: Request) -> Response:
    if request.path == f"{API}/die":
        os.kill(os.getpid(), signal.SIGKILL)
    return echo(request)


async def _serve_until_told() -> None:
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    server = await serve(paths.socket_path(), _echo_or_die)
    await told.wait()
    server.close()


def _main() -> None:
    over = Path(paths.state_folder(), "over")
    try:
        with hold_daemon_lock(paths.lock_path()):
            if not over.exists():
                asyncio.run(_serve_until_told())
                over.touch()
    except GpuyardError as error:
        sys.exit(error.message)


if __name__ == "__main__":
    _main()
