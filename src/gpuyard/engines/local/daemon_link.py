"""The keeper's end of a connection to a daemon. Uses the standard library alone, as the keeper does."""

import socket


class DaemonLink:
    """A connected daemon and the lines that it has not received yet. None is skipped: it would wait forever."""

    def __init__(self, link: socket.socket) -> None:
        link.settimeout(0)
        self.link = link
        self.unsent = bytearray()
        self.is_full = False  # as the poll knows it: it reports when more can be sent

    def send(self) -> bool:
        """Return False if the daemon is gone; the next one reads the journal."""
        try:
            del self.unsent[: self.link.send(self.unsent)]
        except BlockingIOError:
            return True
        except OSError:
            self.unsent.clear()
            return False
        return True
