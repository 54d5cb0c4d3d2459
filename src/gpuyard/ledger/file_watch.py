"""Wait until a file in a directory is removed, or closed by a process that had it open for writing.

New files are not reported: they free nothing, and would wake up every waiting process. Systems without inotify (all but
Linux) poll every 50 ms."""

import contextlib
import ctypes
import os
import select
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

_CLOSE_WRITE, _DELETE, _IGNORED = 0x8, 0x200, 0x8000
_EXCLUDE_UNLINKED = 0x4000000
_EVENT = struct.Struct("iIII")
# The kernel reports a close a moment before it releases the lock, and a driver takes a while to free the memory of a
# process that ended: after an event the waits are this short, one after the other.
_SETTLE_S = (0.001, 0.002, 0.01, 0.05, 0.25, 1.0)


class FileWatch:
    """A watch for one waiting thread at a time. `give_back` keeps it open for the next one: to end it takes 10 ms."""

    _idle: ClassVar[dict[tuple[int, Path], list[int | None]]] = {}

    def __init__(self, folder: Path) -> None:
        self._key = (os.getpid(), folder)
        idle = self._idle.setdefault(self._key, [])
        self._descriptor = idle.pop() if idle else _watch(folder)
        if self._descriptor is not None and not _drain(self._descriptor):
            os.close(self._descriptor)
            self._descriptor = _watch(folder)
        self._settling = 0

    def wait(self, timeout_s: float, pids: Iterable[int] = ()) -> bool:
        """Return when a file may have been released or a process has ended; False after `timeout_s` without that."""
        if self._descriptor is None:
            time.sleep(max(0.0, min(timeout_s, 0.05)))
            return True
        is_settling = self._settling < len(_SETTLE_S)
        if is_settling:
            timeout_s = min(timeout_s, _SETTLE_S[self._settling])
            self._settling += 1
        poll = select.poll()  # select() fails on descriptors above 1023
        poll.register(self._descriptor, select.POLLIN)
        with contextlib.ExitStack() as stack:
            for pid in pids:
                with contextlib.suppress(OSError):
                    process = os.pidfd_open(pid)  # becomes readable when the process ends
                    stack.callback(os.close, process)
                    poll.register(process, select.POLLIN)
            if not poll.poll(max(0.0, min(timeout_s, 3600.0)) * 1000):
                return is_settling
        _drain(self._descriptor)
        self._settling = 0
        return True

    def fileno(self) -> int:
        """Return the descriptor for an event loop, which calls `clear` when it is readable; -1 without inotify."""
        return -1 if self._descriptor is None else self._descriptor

    def clear(self) -> None:
        if self._descriptor is not None:
            _drain(self._descriptor)

    def give_back(self) -> None:
        self._idle[self._key].append(self._descriptor)


def _drain(descriptor: int) -> bool:
    """Read all pending events. Return whether the directory is still watched."""
    is_watched = True
    while True:
        try:
            events = os.read(descriptor, 65536)
        except BlockingIOError:
            return is_watched
        offset = 0
        while offset < len(events):
            _, mask, _, length = _EVENT.unpack_from(events, offset)
            is_watched = is_watched and not mask & _IGNORED
            offset += _EVENT.size + length


def _watch(folder: Path) -> int | None:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "inotify_init1"):
        return None
    descriptor: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:
        return None
    if libc.inotify_add_watch(descriptor, os.fsencode(folder), _CLOSE_WRITE | _DELETE | _EXCLUDE_UNLINKED) < 0:
        os.close(descriptor)
        return None
    return descriptor
