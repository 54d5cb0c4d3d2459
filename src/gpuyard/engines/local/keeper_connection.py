"""The daemon's end of a connection to a keeper: what the keeper is sent, and what it says.

What is sent goes out whole or not at all, however long that takes: half a launch would garble all that follow.
"""

import os
import select
import socket
import sys
from collections.abc import Sequence

from gpuyard.engines.local import keeper_journal
from gpuyard.errors import EnvironmentFault

_CHUNK = 1 << 13
_PATIENCE_MS = 2_000
_GREETING_MS = 10_000


class KeeperConnection:
    def __init__(self, pid: int, link: socket.socket) -> None:
        link.settimeout(0)
        self.pid = pid
        self.is_greeted = False
        self._link = link
        self._unread = b""
        self._unsent = memoryview(b"")

    def fileno(self) -> int:
        return self._link.fileno()

    def close(self) -> None:
        self._link.close()

    @property
    def is_outdated(self) -> bool:
        """Whether it has been sent more than it took."""
        return len(self._unsent) > 0

    def listen(self) -> tuple[list[keeper_journal.JournalEntry], bool]:
        """What is new, and whether it is gone."""
        while True:
            try:
                news = self._link.recv(_CHUNK)
            except BlockingIOError:
                return self._entries(), False
            except ConnectionError:
                news = b""
            if not news:
                return self._entries(), True
            self._unread += news

    def has_news_soon(self) -> bool:
        return self._waits(select.POLLIN, _GREETING_MS)

    def send(self, content: bytes, leases: Sequence[int]) -> bool:
        """False where nothing of it went, and nothing will: nobody is there, or nobody listens."""
        self.send_rest()
        if self.is_outdated:
            return False
        taken = self._send(memoryview(content), leases)
        self._unsent = memoryview(content)[taken:] if taken else self._unsent
        self.send_rest()
        return taken > 0

    def send_rest(self) -> None:
        while self._unsent:
            taken = self._send(self._unsent, ())
            if not taken:
                return
            self._unsent = self._unsent[taken:]

    def _send(self, content: memoryview, leases: Sequence[int]) -> int:
        """How much was taken. A keeper may be busy with what it got; one that takes nothing for so long hangs, as a
        file system that is gone may make it."""
        numbers = b"".join(at.to_bytes(4, sys.byteorder) for at in leases)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)] if leases else []
        while True:
            try:
                return self._link.sendmsg([content], rights)
            except BlockingIOError:
                if not self._waits(select.POLLOUT, _PATIENCE_MS):
                    return 0
            except OSError:
                return 0

    def _waits(self, event: int, patience_ms: int) -> bool:
        poll = select.poll()
        poll.register(self._link, event)
        return bool(poll.poll(patience_ms))

    def _entries(self) -> list[keeper_journal.JournalEntry]:
        entries, length = keeper_journal.parse(self._unread)
        self._unread = self._unread[length:]
        return entries


def connect(folder: str, pid: int) -> KeeperConnection | None:
    """`None` where there is no such keeper. Any other failure must not be taken for that: what it keeps would be
    begun a second time.

    Through a descriptor of the folder where it can be: a socket's address has no room for a long path.
    """
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            link.connect(f"/proc/self/fd/{place}/{pid}.sock" if sys.platform == "linux" else f"{folder}/{pid}.sock")
        finally:
            os.close(place)
    except (FileNotFoundError, ConnectionRefusedError):
        link.close()
        return None
    except OSError as error:
        link.close()
        raise EnvironmentFault(
            f"the keeper {pid} of running jobs cannot be reached: {error.strerror}",
            hint="see whether the limit on open files (ulimit -n) is reached, then start the daemon again",
        ) from error
    return KeeperConnection(pid, link)
