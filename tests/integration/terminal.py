"""A program in a terminal of its own, to type into and to read from."""

import codecs
import contextlib
import os
import pty
import select
import subprocess
import time
from collections.abc import Mapping, Sequence

DEADLINE_S = 90.0


class Terminal:
    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._ours, theirs = pty.openpty()
        self._process = subprocess.Popen(
            ["setsid", "--ctty", *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", **environment},
        )
        os.close(theirs)
        self._unread = ""
        # A read may end within a character.
        self._decode = codecs.getincrementaldecoder("utf-8")().decode

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def read_until(self, awaited: str) -> str:
        """What came before it; what comes after it is left for the next time."""
        deadline = time.monotonic() + DEADLINE_S
        while awaited not in self._unread:
            ready, _, _ = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"'{awaited}' never came: {self._unread!r}"
            self._unread += self._decode(os.read(self._ours, 4096))
        before, _, self._unread = self._unread.partition(awaited)
        return before

    def end(self) -> tuple[int, str]:
        """Its status, and what it said to the end."""
        with contextlib.suppress(OSError):  # Linux tells the end of a terminal so
            while chunk := os.read(self._ours, 4096):
                self._unread += self._decode(chunk)
        return self._process.wait(DEADLINE_S), self._unread

    def close(self) -> None:
        self._process.kill()
        self._process.wait(DEADLINE_S)
        os.close(self._ours)
