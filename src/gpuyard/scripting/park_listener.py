"""The side of a program that can park its GPU memory: it answers requests (`system/park_sockets.py`) in a thread, and
fulfils them where the program calls `point`.

- The thread never touches the GPU. `point` costs a look at one variable while nothing is asked.
- A program that has parked stays in `point` until it is asked to return.
"""

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable

from gpuyard.system import user_sockets
from gpuyard.system.park_sockets import LONGEST_LINE, PARK, PARKED, REFUSED, RETURN, RETURNED

_READ_WITHIN_S = 5.0


class ParkListener:
    """`park` moves the GPU memory out and returns how many bytes that were; `bring_back` moves it back. Both are called
    in the thread that calls `point`. If `bring_back` raises RuntimeError, the program stays parked."""

    def __init__(self, path: str, park: Callable[[], int], bring_back: Callable[[], None]) -> None:
        """Raises OSError or GpuyardError if the socket cannot be made."""
        self._park = park
        self._bring_back = bring_back
        self._path = path
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._asked: bytes | None = None  # what `point` shall do
        self._is_parked = False
        self._answer: str | None = None
        self._wake = socket.socketpair()
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        self._socket = user_sockets.bind(path)
        self._socket.listen()
        threading.Thread(target=self._serve, name="gpuyard-park", daemon=True).start()

    def point(self) -> None:
        """Park now if that was asked for, and return when the memory is back."""
        if self._asked is None or os.getpid() != self._pid:  # a forked child has no GPU memory of its own
            return
        parked_bytes = 0
        while (asked := self._asked) is not None:
            try:
                if asked == PARK and not self._is_parked:
                    parked_bytes = self._park()
                    self._is_parked = True
                elif asked == RETURN and self._is_parked:
                    self._bring_back()
                    self._is_parked = False
                self._reply(asked, f"{PARKED} {parked_bytes}" if asked == PARK else RETURNED)
            except RuntimeError as error:
                self._reply(asked, f"{REFUSED} {error}")
            with self._changed:
                self._changed.wait_for(lambda: self._asked is not None or not self._is_parked)

    def close(self) -> None:
        """Withdraw the registration. Nothing happens in a forked child."""
        if os.getpid() == self._pid:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

    def _reply(self, asked: bytes, text: str) -> None:
        with self._changed:
            if self._asked == asked:
                self._asked, self._answer = None, text
        self._wake[1].send(b"x")

    # The thread

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            with connection, contextlib.suppress(OSError):
                if user_sockets.is_same_user(connection):
                    self._handle(connection)

    def _handle(self, connection: socket.socket) -> None:
        connection.settimeout(_READ_WITHIN_S)
        asked = connection.recv(LONGEST_LINE).strip()
        if asked not in (PARK, RETURN):
            connection.sendall(f"{REFUSED} an unknown request\n".encode())
            return
        if asked == RETURN and not self._is_parked:
            connection.sendall(f"{RETURNED}\n".encode())
            return
        with self._changed:
            self._asked, self._answer = asked, None
            self._changed.notify_all()
        try:
            answer = self._wait_for_answer(connection)
            connection.sendall(f"{' '.join(answer.split())[:LONGEST_LINE]}\n".encode())
        except OSError:
            self._withdraw(asked)

    def _wait_for_answer(self, connection: socket.socket) -> str:
        """Raises ConnectionAbortedError if the other side closes the connection first."""
        while True:
            with self._changed:
                if self._answer is not None:
                    return self._answer
            ready, _, _ = select.select([connection, self._wake[0]], [], [])
            if self._wake[0] not in ready:
                raise ConnectionAbortedError
            self._wake[0].recv(LONGEST_LINE)

    def _withdraw(self, asked: bytes) -> None:
        """Let a program that was asked to park, and may have done so, go on. A return is not withdrawn."""
        if asked == PARK:
            with self._changed:
                self._asked = RETURN
                self._changed.notify_all()
