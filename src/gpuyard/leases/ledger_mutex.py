"""The mutex of a ledger: a lock on its directory. Only its holder changes the ledger. Hold it briefly.

- The directory itself is locked (flock), not a file in it: only the owner of its parent directory can replace it.
- A lock counts only if the path still leads to the locked directory, and if other users cannot remove files in it.
- Readers need no mutex. Any user who may read the directory can hold the lock for long, so every wait has a limit.
- Signals are deferred while the mutex is held, and not while this process waits for it.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from gpuyard.errors import EnvironmentFault, WaitedTooLong
from gpuyard.leases.ledger_directory import check_sticky
from gpuyard.system.file_locks import find_lock_holders, pauses_s, try_lock, unlock
from gpuyard.system.interrupts import DeferInterrupts
from gpuyard.system.passing_errors import remedy_of
from gpuyard.system.process_identity import describe_process

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_open_here: set[int] = set()


@contextlib.contextmanager
def hold_mutex(folder: Path, timeout_s: float) -> Iterator[None]:
    """Hold the mutex for the block. Raises WaitedTooLong if another process holds it for longer than `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    for pause_s in pauses_s():
        with DeferInterrupts():
            descriptor = try_mutex(folder)
            if descriptor is not None:
                try:
                    yield
                finally:
                    release_mutex(descriptor)
                return
        if time.monotonic() > deadline:
            raise busy_too_long(folder, timeout_s)
        time.sleep(pause_s)


def describe_mutex_holder(folder: Path) -> str | None:
    """Return which process holds the mutex, or None if this process sees none."""
    try:
        pids = find_lock_holders(os.stat(folder))
    except OSError:
        return None
    return ", ".join(describe_process(pid) for pid in pids) or None


def unwritable(folder: Path, error: OSError) -> EnvironmentFault:
    return EnvironmentFault(
        f"the lease directory {folder} cannot be written: {error.strerror}",
        hint=remedy_of(error) or "set GPUYARD_LOCK_DIR to another directory",
    )


def try_mutex(folder: Path) -> int | None:
    """Return the descriptor of the locked directory, or None if it is locked or was replaced meanwhile."""
    try:
        descriptor = os.open(folder, _FLAGS)
    except OSError as error:
        raise unwritable(folder, error) from error
    _open_here.add(descriptor)
    is_mine = False
    try:
        if try_lock(descriptor):
            status = os.fstat(descriptor)
            check_sticky(folder, status)
            is_mine = _leads_to(folder, status)
    finally:
        if not is_mine:
            _close(descriptor)
    return descriptor if is_mine else None


def release_mutex(descriptor: int) -> None:
    if descriptor in _open_here:  # not in a forked child
        unlock(descriptor)
        _close(descriptor)


def _leads_to(folder: Path, status: os.stat_result) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(folder), status)
    return False


def busy_too_long(folder: Path, timeout_s: float) -> WaitedTooLong:
    holder = describe_mutex_holder(folder)
    if holder is None:
        return WaitedTooLong(
            f"the ledger in {folder} was busy for {timeout_s:g} s",
            hint=f"a stopped process may hold the directory's lock: find it with `lsof {folder}`",
        )
    return WaitedTooLong(
        f"the ledger in {folder} was busy for {timeout_s:g} s: its lock is held by {holder}",
        hint="if that process is stopped, its user has to continue it (`kill -CONT`) or end it",
    )


def _close(descriptor: int) -> None:
    _open_here.discard(descriptor)
    os.close(descriptor)


def _leave_in_child() -> None:
    """Close the mutex in a forked child: it shares the parent's lock, but has no thread that would release it."""
    for descriptor in list(_open_here):
        _close(descriptor)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_in_child)
