"""Shared by the tests of the ledger: real processes that exchange messages with the test, and claims."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

import pytest

from gpuyard.model.lease import Claim, Holder, Lease, Share, Ticket

DEADLINE_S = 90.0
ME = Holder(uid=os.getuid(), user="me", pid=os.getpid())
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user, or mount a small disk")

# A fork server: each process starts in milliseconds, and none inherits a thread of the test run.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [__name__, "psutil", "gpuyard.ledger.wait_for_devices", "gpuyard.probes.simulated_devices"]
)


def start_fork_server() -> None:
    """Start the fork server before a test replaces functions that its start calls, such as `tempfile.mkdtemp`: its lock
    is held then, and a replacement that starts a child would wait for it for ever."""
    forkserver.ensure_running()


class Child:
    """A process that runs `function(connection, *arguments)`."""

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=function, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def receive(self) -> Any:
        assert self._connection.poll(DEADLINE_S), "the child sends nothing"
        return self._connection.recv()

    def has_message(self) -> bool:
        return self._connection.poll()

    def send(self, message: Any) -> None:
        self._connection.send(message)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.join()

    def join(self) -> None:
        self._process.join(DEADLINE_S)
        assert self._process.exitcode is not None, "the child does not end"


@contextlib.contextmanager
def child(function: Callable[..., None], *arguments: Any) -> Iterator[Child]:
    process = Child(function, *arguments)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


def wait_for_message(connection: Connection) -> Any:
    """In a child: return the next message of the test. The child ends with the test."""
    return connection.recv()


def take(*device_ids: str, memory_mb: float | None = None) -> Callable[[tuple[Lease, ...], tuple[Ticket, ...]], Claim]:
    """Return a decision that claims these devices, even if other leases hold them."""
    shares = tuple(Share(device_id=each, memory_mb=memory_mb, is_exclusive=memory_mb is None) for each in device_ids)
    return lambda leases, tickets: Claim(shares=shares)


def nothing(leases: tuple[Lease, ...], tickets: tuple[Ticket, ...]) -> None:
    """Claim nothing: this only reads under the mutex, which removes the files of ended processes."""
