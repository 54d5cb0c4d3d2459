"""Asks a program that has registered for it (`system/park_sockets.py`) to park its GPU memory, and to take it back.

Only a job with one registered process is asked: several that work together wait for each other within a step, and would
not all reach its end.
"""

import _socket
import contextlib
from collections.abc import Sequence

from gpuyard.engines.local.system_processes import TrackedProcess
from gpuyard.errors import GpuyardError
from gpuyard.system import user_sockets
from gpuyard.system.park_sockets import LONGEST_LINE, PARK, PARKED, RETURN, RETURNED, path_of, registered

# A program is asked for this long to come to the end of its step; then the driver suspends it.
PARKS_WITHIN_S = 10.0
_RETURNS_WITHIN_S = 120.0


class RegisteredProgram:
    """The registered process of an attempt."""

    def __init__(self, path: str, parks_within_s: float) -> None:
        self._path = path
        self._parks_within_s = parks_within_s

    def park(self) -> int | None:
        """Return how many bytes of GPU memory it has moved to RAM; None if it has not, and goes on as it was."""
        word, _, text = self._ask(PARK, self._parks_within_s).partition(" ")
        if word == PARKED and text.isdigit():
            return int(text)
        self.bring_back()
        return None

    def bring_back(self) -> str | None:
        """Return why its memory is not back, or None if it is."""
        answer = self._ask(RETURN, _RETURNS_WITHIN_S)
        return None if answer == RETURNED else answer.partition(" ")[2] or "it does not answer"

    def _ask(self, request: bytes, within_s: float) -> str:
        """Return the answer; empty without one in time."""
        with contextlib.suppress(OSError, GpuyardError, UnicodeDecodeError):
            connection = user_sockets.connect(self._path, within_s)
            try:
                connection.send(request + b"\n")
                return _read_line(connection)
            finally:
                connection.close()
        return ""


def find_registered(
    queue: str, attempt: str, processes: Sequence[TrackedProcess], parks_within_s: float
) -> RegisteredProgram | None:
    """Return the only registered process of an attempt; None if there is none, or several."""
    alive = {process.pid for process in processes}
    pids = [pid for pid in registered(queue, attempt) if pid in alive]
    return RegisteredProgram(path_of(queue, attempt, pids[0]), parks_within_s) if len(pids) == 1 else None


def _read_line(connection: _socket.socket) -> str:
    received = b""
    while not received.endswith(b"\n") and (part := connection.recv(LONGEST_LINE)):
        received += part
    return received.decode().strip() if received.endswith(b"\n") else ""
