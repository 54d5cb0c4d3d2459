"""Locks on open files: flock, write locks that say "a process of the owner holds this file", and a lock that keeps
`systemd-tmpfiles` from emptying a folder in /var/tmp.

- A lock belongs to the open file, not to the process: it lasts until the last copy of the descriptor is closed, also in
  forked children. Open files with O_CLOEXEC, and `unlock` before closing: a thread may just have forked.
- A lock counts only while its file has a name: a process that waited may have locked a file that was removed meanwhile.
- Owner locks are open-file-description locks on Linux (F_OFD_SETLK); elsewhere flock, which any reader can hold. They
  need a descriptor that is open for writing: only the file's owner and root can hold one. The test (`is_held`)
  takes no lock. Byte 0 is the lock. A holder that shows that it is not stopped (`beat`) also locks the byte of the
  present second: that changes neither the file nor its times, and wakes up no process that watches the directory."""

import contextlib
import errno
import fcntl
import os
import signal
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

from gpuyard.errors import EnvironmentFault

_Handler: TypeAlias = Callable[[int, FrameType | None], object]
_SIGNALS = (int(signal.SIGINT), int(signal.SIGTERM), int(signal.SIGALRM))
# The C module below `signal`: without its conversions to enums, which take longer than all the rest.
_fast_signal: Any = sys.modules.get("_signal", signal)


class DeferInterrupts:
    """Defer signals with a Python handler until the block is left. Blocks may be nested; the outermost one defers. Keep
    the block short and without waiting. In other threads than the main thread there is nothing to defer."""

    _outermost: "DeferInterrupts | None" = None

    def __init__(self) -> None:
        self.is_active = False
        self.pending: dict[int, _Handler] = {}
        self._replaced: list[tuple[int, _Handler, _Handler]] = []

    def __enter__(self) -> None:
        if DeferInterrupts._outermost is not None or threading.get_ident() != threading.main_thread().ident:
            return
        self.is_active = True
        try:
            for number in _SIGNALS:
                handler = _fast_signal.getsignal(number)
                if callable(handler):
                    deferring = self._deferring(handler)
                    self._replaced.append((number, handler, deferring))
                    _fast_signal.signal(number, deferring)
            DeferInterrupts._outermost = self
        except BaseException:
            self._restore()
            raise

    def _deferring(self, handler: _Handler) -> _Handler:
        """Return a handler in place of another one: it keeps the signal while this block defers it."""

        def defer(number: int, frame: FrameType | None) -> None:
            if self.is_active:
                self.pending[number] = handler
            else:
                handler(number, frame)

        return defer

    def __exit__(self, *_: object) -> None:
        if DeferInterrupts._outermost is self:
            DeferInterrupts._outermost = None
            self._restore()

    def _restore(self) -> None:
        try:
            for number, handler, deferring in self._replaced:
                if _fast_signal.getsignal(number) is deferring:
                    _fast_signal.signal(number, handler)
        finally:  # a handler that was restored may have raised: those that were not pass their signals on
            self.is_active = False
        for number, handler in self.pending.items():
            handler(number, None)


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock the file if no other open file has a conflicting lock. Return False otherwise."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_within(descriptor: int, timeout_s: float) -> bool:
    """Lock the file as soon as possible. Return False after `timeout_s`."""
    deadline, pauses = time.monotonic() + timeout_s, pauses_s()
    while not try_lock(descriptor):
        if time.monotonic() > deadline:
            return False
        time.sleep(next(pauses))
    return True


def pauses_s() -> Iterator[float]:
    """Yield the pauses between attempts to get a lock, without an end."""
    pause_s = 0.0002
    while True:
        yield pause_s
        pause_s = min(0.01, pause_s * 1.5)


def lock(descriptor: int) -> None:
    """Wait for the lock without a limit."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def unlock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def find_lock_holders(status: os.stat_result) -> list[int]:
    """Return the processes that locked the file with flock, as far as the kernel shows them. It shows no process of
    another container. If a process has ended and left its lock to a child, it is named still."""
    key = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
    rows = (fields for line in lines if len(fields := line.split()) >= 6)
    return [int(fields[4]) for fields in rows if (fields[1], fields[5]) == ("FLOCK", key)]


def has_name(descriptor: int) -> bool:
    """Return whether the open file has not been removed."""
    return os.fstat(descriptor).st_nlink > 0


_IN_TIME_S = 60.0


def lock_in_time(descriptor: int, path: str | Path) -> None:
    """Wait for the lock for a minute, then raise EnvironmentFault: every user who can read a file can lock it."""
    if not lock_within(descriptor, _IN_TIME_S):
        problem = f"another process has kept {path} locked for {_IN_TIME_S:g} s"
        raise EnvironmentFault(problem, hint="`lslocks` shows who holds the lock")


@contextlib.contextmanager
def hold_lock_file(path: str | Path) -> Iterator[None]:
    """Create the file, hold its lock in this block, and remove the file. Waits without a limit, for a caller that has a
    timer of its own."""
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


_HAS_OWNER_LOCKS = hasattr(fcntl, "F_OFD_SETLK")
_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length (0: to the end), pid
_FIRST_BEAT = 1


def try_hold(descriptor: int) -> bool:
    """Hold the file. Return False if another open file holds a lock on it. Needs a descriptor open for writing."""
    if not _HAS_OWNER_LOCKS:
        return try_lock(descriptor)
    try:
        _set(descriptor, fcntl.F_WRLCK, 0, 1)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def is_held(descriptor: int) -> bool:
    """Return whether another open file holds it. Reading is enough."""
    if not _HAS_OWNER_LOCKS:
        # Shared: readers that test at the same time do not take each other for a holder.
        if not try_lock(descriptor, shared=True):
            return True
        unlock(descriptor)
        return False
    return _is_write_locked(descriptor, 0, 1)


def unhold(descriptor: int) -> None:
    """Release the lock for all processes that share the open file."""
    if _HAS_OWNER_LOCKS:
        _set(descriptor, fcntl.F_UNLCK, 0, 0)
    else:
        unlock(descriptor)


def beat(descriptor: int) -> None:
    """Record that a holder of the file is running now."""
    if _HAS_OWNER_LOCKS:
        now = _FIRST_BEAT + int(time.monotonic())
        _set(descriptor, fcntl.F_WRLCK, now, 1)
        _set(descriptor, fcntl.F_UNLCK, _FIRST_BEAT, now - _FIRST_BEAT)


def has_beaten(descriptor: int, within_s: int) -> bool:
    """Return whether a holder has called `beat` in the last `within_s` seconds; True if that cannot be known. The
    seconds are those of CLOCK_MONOTONIC, which all processes of the machine share, and which stands still while the
    machine sleeps. In a container with a clock of its own (a time namespace) the seconds differ."""
    if not _HAS_OWNER_LOCKS:
        return True
    first = max(0, int(time.monotonic()) - within_s)
    return _is_write_locked(descriptor, _FIRST_BEAT + first, within_s + 2)  # some slack


def _set(descriptor: int, kind: int, start: int, length: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))


def _is_write_locked(descriptor: int, start: int, length: int) -> bool:
    asked = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, start, length, 0)
    kind: int = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked))[0]
    return kind != fcntl.F_UNLCK


@contextlib.contextmanager
def kept_from_cleaning(folder: str) -> Iterator[None]:
    """Lock the folder in this block. Mark the files in it, at first and in the end, so that they stay until the next
    time. Folders in it, such as that of the logs, are kept only while a process is in this block."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try_lock(descriptor, shared=True)
        for is_last in (False, True):
            for name in os.listdir(descriptor):
                with contextlib.suppress(OSError):
                    mode = os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode
                    if stat.S_ISREG(mode):
                        os.chmod(name, stat.S_IMODE(mode) | stat.S_ISVTX, dir_fd=descriptor)
            if not is_last:
                yield
    finally:
        os.close(descriptor)
