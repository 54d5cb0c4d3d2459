"""The one short-held lock of a ledger: whoever holds it keeps all others from looking and from changing anything."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from gpuyard.errors import EnvironmentFault, WaitedTooLong

MUTEX = "mutex"
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.01
_open_here: set[int] = set()


@contextlib.contextmanager
def hold_mutex(folder: Path, timeout_s: float) -> Iterator[None]:
    """WaitedTooLong where somebody else holds it for longer than `timeout_s`."""
    descriptor = _open_locked(folder, timeout_s)
    try:
        yield
    finally:
        if descriptor in _open_here:
            # Closing alone would not do where another thread has just forked.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            _close(descriptor)


def _leave_in_child() -> None:
    """A child forked in the middle has the lock with its parent and, unlike it, no thread that would ever let go."""
    for descriptor in list(_open_here):
        _close(descriptor)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_in_child)


def unwritable(folder: Path, error: OSError) -> EnvironmentFault:
    return EnvironmentFault(
        f"the lease directory {folder} cannot be written: {error.strerror}",
        hint="free some space, or name another with GPUYARD_LOCK_DIR",
    )


def _open_locked(folder: Path, timeout_s: float) -> int:
    while True:
        try:
            descriptor = _open(folder / MUTEX)
        except OSError as error:
            raise unwritable(folder, error) from error
        _open_here.add(descriptor)
        try:
            _lock(descriptor, folder, timeout_s)
        except BaseException:
            _close(descriptor)
            raise
        if os.fstat(descriptor).st_nlink:
            return descriptor
        _close(descriptor)  # removed while we waited for it: others lock a new one by now


def _close(descriptor: int) -> None:
    _open_here.discard(descriptor)
    os.close(descriptor)


def _open(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, _FLAGS)
    try:
        # With O_EXCL: in a sticky directory the kernel may refuse to create what another user has just made.
        descriptor = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return os.open(path, _FLAGS)
    os.fchmod(descriptor, 0o644)
    return descriptor


def _lock(descriptor: int, folder: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    pause = _FIRST_PAUSE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise WaitedTooLong(
                    f"the ledger in {folder} was busy for {timeout_s:g} s",
                    hint="a process that holds its mutex may be stopped: see `lsof` on the file `mutex` there",
                ) from None
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE_S, pause * 1.5)
        else:
            return
