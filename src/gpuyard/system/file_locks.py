"""Locks on open files (flock).

- A lock belongs to the open file, not to the process: it lasts until the last copy of the descriptor is closed, also in
  forked children. Open files with O_CLOEXEC, so that started programs do not keep their locks.
- `unlock` before closing: a thread may just have forked, and closing alone would leave the lock with the child.
- A lock counts only while its file has a name: a process that waited may have locked a file that was removed meanwhile.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from gpuyard.errors import EnvironmentFault

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.01
_IN_TIME_S = 60.0


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock the file if no other open file has a conflicting lock. Return False otherwise."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_within(descriptor: int, timeout_s: float, *, shared: bool = False) -> bool:
    """Lock the file as soon as possible. Return False after `timeout_s`."""
    deadline, pauses = time.monotonic() + timeout_s, pauses_s()
    while not try_lock(descriptor, shared=shared):
        if time.monotonic() > deadline:
            return False
        time.sleep(next(pauses))
    return True


def pauses_s() -> Iterator[float]:
    """Yield the pauses between attempts to get a lock, without an end."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(_LONGEST_PAUSE_S, pause_s * 1.5)


def lock(descriptor: int) -> None:
    """Wait for the lock without a limit."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def unlock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def find_lock_holders(status: os.stat_result, source: Path = Path("/proc/locks")) -> list[int]:
    """Return the processes that locked the file with flock, as far as the kernel shows them.

    It shows no process of another container. If a process has ended and left its lock to a child, it is named still.
    """
    key = (os.major(status.st_dev), os.minor(status.st_dev), status.st_ino)
    try:
        lines = source.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
    found: list[int] = []
    for fields in map(str.split, lines):
        if len(fields) >= 6 and fields[1] == "FLOCK" and fields[5].count(":") == 2:
            major, minor, inode = fields[5].split(":")
            if (int(major, 16), int(minor, 16), int(inode)) == key:
                found.append(int(fields[4]))
    return found


def has_name(descriptor: int) -> bool:
    """Return whether the open file has not been removed."""
    return os.fstat(descriptor).st_nlink > 0


def lock_in_time(descriptor: int, path: str | Path) -> None:
    """Wait for the lock up to 60 s, then raise EnvironmentFault: every user who can read a file can lock it."""
    if not lock_within(descriptor, _IN_TIME_S):
        raise EnvironmentFault(
            f"another process has kept {path} locked for {_IN_TIME_S:g} s", hint="`lslocks` shows who holds the lock"
        )


@contextlib.contextmanager
def hold_lock_file(path: str | Path) -> Iterator[None]:
    """Create the file, hold its lock in this block, and remove the file.

    Waits without a limit, for a caller that has a timer of its own.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        lock(descriptor)
        if has_name(descriptor):
            break
        os.close(descriptor)  # its last holder removed the file: others lock a new one by now
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.close(descriptor)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder in this block: changes to its files exclude each other. Waits up to 60 s."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        lock_in_time(descriptor, folder)
        yield
    finally:
        os.close(descriptor)
