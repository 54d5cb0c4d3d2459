"""What an event loop can watch: several descriptors through one, and signals through a pipe."""

import os
import select
import signal
import threading
from collections.abc import Mapping
from typing import TypeVar

_Watched = TypeVar("_Watched")


class WakeablePoll:
    """An epoll. Without epoll (not Linux) `fileno()` is -1 and `ready` returns everything: ask it now and then."""

    def __init__(self) -> None:
        self._poll = select.epoll() if hasattr(select, "epoll") else None
        self._closing = threading.Lock()
        self._wakeup = -1 if self._poll is None else os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.watch(self._wakeup)

    def fileno(self) -> int:
        """Readable while a watched descriptor is ready, or after `wake`."""
        return -1 if self._poll is None else self._poll.fileno()

    def watch(self, descriptor: int) -> None:
        if self._poll is not None:
            self._poll.register(descriptor, select.EPOLLIN)

    def want_to_write(self, descriptor: int, *, wants: bool) -> None:
        if self._poll is not None:
            self._poll.modify(descriptor, select.EPOLLIN | (select.EPOLLOUT if wants else 0))

    def forget(self, descriptor: int) -> None:
        """Call it before closing a descriptor: epoll keeps a closed one while another process has it open."""
        if self._poll is not None:
            self._poll.unregister(descriptor)

    def wake(self) -> None:
        """Make `fileno()` readable until the next call of `ready`. For any thread, also after `close`."""
        with self._closing:
            if self._poll is not None and not self._poll.closed:
                os.eventfd_write(self._wakeup, 1)

    def ready(self, watched: Mapping[int, _Watched]) -> list[_Watched]:
        """Return those of `watched`, by descriptor, that are ready now."""
        if self._poll is None:
            return list(watched.values())
        ready = [descriptor for descriptor, _ in self._poll.poll(0)]
        if self._wakeup in ready:
            os.eventfd_read(self._wakeup)
        return [watched[descriptor] for descriptor in ready if descriptor in watched]

    def close(self) -> None:
        with self._closing:
            if self._poll is not None and not self._poll.closed:
                self._poll.close()
                os.close(self._wakeup)


def open_signal_pipe() -> tuple[int, int]:
    """Return both ends of a non-blocking pipe to which Python writes the number of every signal that has a handler.
    Only for the main thread. A full pipe loses numbers silently."""
    reading, writing = os.pipe()
    for end in (reading, writing):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading, writing
