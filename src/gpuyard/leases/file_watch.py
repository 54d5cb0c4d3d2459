"""Notices at once when a file in a directory is removed, or closed by its last holder.

That a file is made is no news: nobody who waits gains by it, and all who wait would look again.

Where the system has no such notices (anything but Linux), it looks again after a short while.
"""

import contextlib
import ctypes
import os
import select
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

_CLOSE_WRITE, _DELETE, _IGNORED = 0x8, 0x200, 0x8000
_NOT_AFTER_REMOVAL = 0x4000000
_EVENT = struct.Struct("iIII")
_NONBLOCK, _CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC
_WITHOUT_NOTICES_S = 0.05
_LONGEST_S = 3600.0
# The kernel tells of a close a moment before it lets go of the lock.
# After that a driver takes a while to give back the memory of a process that ended.
_SETTLE_S = (0.001, 0.002, 0.01, 0.05, 0.25, 1.0)


class FileWatch:
    """For one who waits at a time. Giving it back keeps it open: the kernel takes 10 ms to end a watch."""

    _idle: ClassVar[dict[tuple[int, Path], list[int | None]]] = {}

    def __init__(self, folder: Path) -> None:
        self._key = (os.getpid(), folder)
        idle = self._idle.setdefault(self._key, [])
        self._descriptor = idle.pop() if idle else _watch(folder)
        if self._descriptor is not None and not _drain(self._descriptor):
            os.close(self._descriptor)
            self._descriptor = _watch(folder)
        self._settling = 0

    def wait(self, timeout_s: float, pids: Iterable[int] = ()) -> None:
        """Return when something may have changed, when one of these processes has ended, or when the time is up."""
        if self._descriptor is None:
            time.sleep(max(0.0, min(timeout_s, _WITHOUT_NOTICES_S)))
            return
        if self._settling < len(_SETTLE_S):
            timeout_s = min(timeout_s, _SETTLE_S[self._settling])
            self._settling += 1
        with _opened(pids) as processes:
            if _is_ready((self._descriptor, *processes), timeout_s):
                _drain(self._descriptor)
                self._settling = 0

    def fileno(self) -> int:
        """For an event loop, which calls `clear` when it is readable; -1 where the system has no notices."""
        return -1 if self._descriptor is None else self._descriptor

    def clear(self) -> None:
        if self._descriptor is not None:
            _drain(self._descriptor)

    def give_back(self) -> None:
        self._idle[self._key].append(self._descriptor)


@contextlib.contextmanager
def _opened(pids: Iterable[int]) -> Iterator[list[int]]:
    """Open descriptors that become readable when the processes end, of those that are there."""
    with contextlib.ExitStack() as stack:
        found = []
        for pid in pids:
            with contextlib.suppress(OSError):
                found.append(os.pidfd_open(pid))
                stack.callback(os.close, found[-1])
        yield found


def _is_ready(descriptors: Iterable[int], timeout_s: float) -> bool:
    poll = select.poll()  # unlike select(), for a program with thousands of open files too
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, min(timeout_s, _LONGEST_S)) * 1000))


def _drain(descriptor: int) -> bool:
    """Takes what is there to be read, and tells whether the directory is still being watched."""
    is_watched = True
    while True:
        try:
            events = os.read(descriptor, 65536)
        except BlockingIOError:
            return is_watched
        place = 0
        while place < len(events):
            _, mask, _, length = _EVENT.unpack_from(events, place)
            is_watched = is_watched and not mask & _IGNORED
            place += _EVENT.size + length


def _watch(folder: Path) -> int | None:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "inotify_init1"):
        return None
    descriptor: int = libc.inotify_init1(_NONBLOCK | _CLOEXEC)
    if descriptor < 0:
        return None
    if libc.inotify_add_watch(descriptor, os.fsencode(folder), _CLOSE_WRITE | _DELETE | _NOT_AFTER_REMOVAL) < 0:
        os.close(descriptor)
        return None
    return descriptor
