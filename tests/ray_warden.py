"""A program that runs a command, adopts all of its descendants, and kills them when its standard input is closed.

It is a subreaper: descendants with a dead parent become its children.
"""

import contextlib
import ctypes
import os
import select
import sys
from collections.abc import Iterator

import psutil

_SET_CHILD_SUBREAPER = 36


def _ward(command: list[str]) -> int:
    """Run the command; return at once if it fails, else wait for the end of stdin."""
    if ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        return 1
    starter = os.posix_spawnp(command[0], command, os.environ)
    while not select.select([0], [], [], 0.1)[0]:
        if (starter, True) in _reap():
            break
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        list(_reap())
    return 0


def _reap() -> Iterator[tuple[int, bool]]:
    """Yield the pid of each ended child, and whether it failed."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended[0], ended[1] != 0


if __name__ == "__main__":
    sys.exit(_ward(sys.argv[1:]))
