"""The prefetch queue: launches that the keeper may start by itself, each in the place of a job that has succeeded.

It is a pair of sockets. The daemon puts launches into it. The kernel gives each launch to one receiver: to the keeper,
which starts it, or to the daemon, which takes it back. Neither waits for the other.

A launch begins with the number of its group: jobs of a group need the same, and so can use the lease of one another.
This module uses the standard library alone, as the keeper does.
"""

import os
import select
import socket
import stat

# More does not fit into the buffer of a socket, as systems set it.
_LONGEST = 1 << 18
_NUMBER = 4


class PrefetchQueue:
    """The daemon's side. It has both sockets, and the keeper a copy of `taking`."""

    def __init__(self) -> None:
        self._putting, self.taking = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._putting.settimeout(0)
        self.taking.settimeout(0)

    def put(self, group: int, content: bytes) -> bool:
        """Return False if there is no room for it."""
        try:
            return self._putting.send(group.to_bytes(_NUMBER, "big") + content) > 0
        except OSError:  # it is full, or the launch is too long for it
            return False

    def take_back(self, most: int | None = None) -> list[bytes]:
        """Return the launches, or the first ones, that the keeper has not taken, which it will not get any more."""
        taken: list[bytes] = []
        while most is None or len(taken) < most:
            try:
                taken.append(self.taking.recv(_LONGEST)[_NUMBER:])
            except BlockingIOError:
                break
        return taken

    def close(self) -> None:
        self._putting.close()
        self.taking.close()


def open_prefetch_queue() -> PrefetchQueue | None:
    """Return a prefetch queue, or None where the system has no such sockets."""
    try:
        return PrefetchQueue()
    except OSError:
        return None


class KeeperPrefetchQueue:
    """The keeper's side."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor` is /dev/null where the system has no such sockets."""
        self._is_open = stat.S_ISSOCK(os.fstat(descriptor).st_mode)
        if self._is_open:
            self._taking = socket.socket(fileno=descriptor)
            self._taking.settimeout(0)
        self._buffer = memoryview(bytearray(_LONGEST))
        self._poll = select.poll()
        self._poll.register(descriptor, 0)

    def take(self, group: int) -> bytes | None:
        """Return the first launch if it is of this group."""
        if not group or not self._is_open:
            return None
        wanted = group.to_bytes(_NUMBER, "big")
        try:
            self._taking.recv_into(self._buffer, _NUMBER, socket.MSG_PEEK)
            if self._buffer[:_NUMBER] != wanted:
                return None
            length = self._taking.recv_into(self._buffer)
        except BlockingIOError:
            return None
        return bytes(self._buffer[_NUMBER:length]) or None

    def has_daemon(self) -> bool:
        """Return whether the daemon lives that put launches here. The kernel knows the moment it dies."""
        return self._is_open and not self._poll.poll(0)

    def close(self) -> None:
        """Take nothing any more: another daemon decides now."""
        if self._is_open:
            self._is_open = False
            self._taking.close()
