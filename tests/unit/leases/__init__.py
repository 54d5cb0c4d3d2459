"""What tests of the ledger share: real processes that say where they are, and leases to write down."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from gpuyard.core.lease import Claim, Holder, Lease, Share, Ticket

DEADLINE_S = 90.0
ME = Holder(uid=os.getuid(), user="me", pid=os.getpid())
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user, or mount a small disk")

# A server that forks: each process is there in milliseconds, and none inherits a thread of the test run's.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([__name__, "psutil", "gpuyard.wait_for_devices", "gpuyard.probes.simulated_devices"])


class Child:
    """A process that runs `function(connection, *arguments)`."""

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        self._here, there = context.Pipe()
        self._process = context.Process(target=function, args=(there, *arguments), daemon=True)
        self._process.start()
        there.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def hear(self) -> Any:
        assert self._here.poll(DEADLINE_S), "the child says nothing"
        return self._here.recv()

    def has_spoken(self) -> bool:
        return self._here.poll()

    def tell(self, word: Any) -> None:
        self._here.send(word)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.join()

    def join(self) -> None:
        self._process.join(DEADLINE_S)
        assert self._process.exitcode is not None, "the child does not end"


@contextlib.contextmanager
def child(function: Callable[..., None], *arguments: Any) -> Iterator[Child]:
    one = Child(function, *arguments)
    try:
        yield one
    finally:
        with contextlib.suppress(ProcessLookupError):
            one.kill()


def wait_for_word(connection: Connection) -> Any:
    """In a child: what the test says next; the child ends with the test."""
    return connection.recv()


def take(*device_ids: str, memory_mb: float | None = None) -> Callable[[tuple[Lease, ...], tuple[Ticket, ...]], Claim]:
    """Decides for these devices, whoever has them."""
    shares = tuple(Share(device_id=each, memory_mb=memory_mb, is_exclusive=memory_mb is None) for each in device_ids)
    return lambda leases, tickets: Claim(shares=shares)


def nothing(leases: tuple[Lease, ...], tickets: tuple[Ticket, ...]) -> None:
    """Decides to take nothing: a look under the mutex, which clears away what the dead left."""
