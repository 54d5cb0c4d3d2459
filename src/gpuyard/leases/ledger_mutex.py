"""The mutex of a ledger: only its holder reads or changes the ledger. Hold it briefly."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from gpuyard.errors import EnvironmentFault, WaitedTooLong
from gpuyard.system.file_locks import has_name, lock_within, unlock
from gpuyard.system.passing_errors import remedy_of

MUTEX = "mutex"
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_open_here: set[int] = set()


@contextlib.contextmanager
def hold_mutex(folder: Path, timeout_s: float) -> Iterator[None]:
    """Hold the mutex for the block. Raises WaitedTooLong if another process holds it for longer than `timeout_s`."""
    descriptor = _open_locked(folder, timeout_s)
    try:
        yield
    finally:
        if descriptor in _open_here:
            unlock(descriptor)
            _close(descriptor)


def _leave_in_child() -> None:
    """Close the mutex in a forked child: it shares the parent's lock, but has no thread that would release it."""
    for descriptor in list(_open_here):
        _close(descriptor)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_in_child)


def unwritable(folder: Path, error: OSError) -> EnvironmentFault:
    return EnvironmentFault(
        f"the lease directory {folder} cannot be written: {error.strerror}",
        hint=remedy_of(error) or "set GPUYARD_LOCK_DIR to another directory",
    )


def _open_locked(folder: Path, timeout_s: float) -> int:
    while True:
        try:
            descriptor = _open(f"{folder}/{MUTEX}")
        except OSError as error:
            raise unwritable(folder, error) from error
        _open_here.add(descriptor)
        try:
            if not lock_within(descriptor, timeout_s):
                raise WaitedTooLong(
                    f"the ledger in {folder} was busy for {timeout_s:g} s",
                    hint=f"a stopped process may hold its mutex: find it with `lsof {folder / MUTEX}`",
                )
        except BaseException:
            _close(descriptor)
            raise
        if has_name(descriptor):
            return descriptor
        _close(descriptor)  # removed while we waited: other processes use a new file


def _close(descriptor: int) -> None:
    _open_here.discard(descriptor)
    os.close(descriptor)


def _open(path: str) -> int:
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, _FLAGS)
    try:
        # Without O_EXCL the kernel may refuse to open another user's file in a sticky directory (protected_regular).
        descriptor = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return os.open(path, _FLAGS)
    os.fchmod(descriptor, 0o644)
    return descriptor
