"""The ledger's directory, and its mutex: a lock on it. Only its holder changes the ledger, briefly. Readers need no
mutex.

- The directory itself is locked (flock), not a file in it: only the owner of its parent directory can replace it. A
lock counts only if the path still leads there, and if other users cannot remove files in it.
- Any user who may read the directory can hold the lock for long, so every wait has a limit. For a program that must not
wait, a thread does (`MutexTurns`).
- Signals are deferred while the mutex is held, and not while this process waits for it."""

import contextlib
import math
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gpuyard.errors import EnvironmentFault, LedgerBusy, UserError, WaitedTooLong
from gpuyard.system.file_locks import DeferInterrupts, find_lock_holders, pauses_s, try_lock, unlock
from gpuyard.system.processes import describe_process
from gpuyard.system.system_limits import remedy_of
from gpuyard.system.user_directories import NETWORK, file_system

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def prepare_directory(folder: Path) -> Path:
    """Make the directory if it is missing, and return it. Raises EnvironmentFault if it cannot be used."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise EnvironmentFault(
            f"the lease directory {folder} cannot be created: {error.strerror}",
            hint="set GPUYARD_LOCK_DIR to another directory",
        ) from error
    kind = file_system(str(folder))
    if kind in NETWORK:
        raise EnvironmentFault(
            f"the lease directory {folder} is on a network file system ({kind}), where locks are not reliable",
            hint="set GPUYARD_LOCK_DIR to a directory on a local disk",
        )
    if not os.access(folder, os.W_OK | os.X_OK | os.R_OK):
        raise EnvironmentFault(
            f"you cannot write to the lease directory {folder}",
            hint="ask its owner for access, or set GPUYARD_LOCK_DIR to another directory",
        )
    check_sticky(folder, status)
    return folder


def check_sticky(folder: Path, status: os.stat_result) -> None:
    """Raise EnvironmentFault if users other than the owner of the directory can remove the files of others in it."""
    if status.st_mode & _WRITABLE_BY_OTHERS and not status.st_mode & stat.S_ISVTX:
        raise EnvironmentFault(
            f"other users could remove your leases in {folder}: the directory is shared, but not sticky",
            hint=f"run `chmod +t {folder}`, or make a new one with `gpuyard leases init-shared DIR`",
        )


def make_shared_directory(folder: Path, group: int | None = None) -> Path:
    """Make a directory in which all users, or those of a group, see all leases and can remove only their own."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A mistyped path must not make a home writable by all.
        others = [name for name in os.listdir(folder) if not name.endswith((".lease", ".ticket", ".drain"))]
        if others:
            raise UserError(f"{folder} holds other files, such as {others[0]}", hint="give the path of a new directory")
        if group is not None:
            os.chown(folder, -1, group)
        folder.chmod(0o1777 if group is None else 0o3770)
    except OSError as error:
        raise EnvironmentFault(f"{folder} cannot be made a shared lease directory: {error.strerror}") from error
    return prepare_directory(folder)


def find_closed_parent(folder: Path) -> Path | None:
    """Return the closest parent directory that other users cannot enter."""
    return next((above for above in folder.resolve().parents if not above.stat().st_mode & stat.S_IXOTH), None)


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


def unwritable(folder: Path, error: OSError) -> EnvironmentFault:
    return EnvironmentFault(
        f"the lease directory {folder} cannot be written: {error.strerror}",
        hint=remedy_of(error) or "set GPUYARD_LOCK_DIR to another directory",
    )


def try_mutex(folder: Path) -> int | None:
    """Return the descriptor of the locked directory, or None if it is locked or was replaced meanwhile."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
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
    problem, pids = f"the ledger in {folder} was busy for {timeout_s:g} s", list[int]()
    with contextlib.suppress(OSError):
        pids += find_lock_holders(os.stat(folder))
    if not pids:  # this process sees none
        hint = f"a stopped process may hold the directory's lock: find it with `lsof {folder}`"
        return WaitedTooLong(problem, hint=hint)
    return WaitedTooLong(
        f"{problem}: its lock is held by {', '.join(map(describe_process, pids))}",
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

_TOO_LONG_S = 0.2


class MutexTurns:
    """All but the waiting happens in one thread, that of the program. `on_turn` is called in the waiting thread when
    the mutex is held for the program, until `end_turn`; and once when others have held it for too long. The waiting
    thread asks `can_use_turn` first, and leaves the mutex to others while that is false."""

    def __init__(self, folder: Path) -> None:
        self.on_turn: Callable[[], object] = lambda: None  # the program tries again by itself
        self.can_use_turn: Callable[[], bool] = lambda: True
        self._folder = folder
        self._changing = threading.Lock()
        self._waits_since: float | None = None
        self._held: int | None = None
        self._is_closed = False

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the mutex for the block. Raises LedgerBusy, and WaitedTooLong after a while; `on_turn` follows."""
        with DeferInterrupts():
            if self._held is not None:
                yield
                return
            descriptor = try_mutex(self._folder)
            if descriptor is not None:
                try:
                    yield
                finally:
                    release_mutex(descriptor)
                return
        now = time.monotonic()
        with self._changing:
            if self._waits_since is None and self._held is None:  # else it is held since a moment ago
                self._waits_since = now
                threading.Thread(target=self._wait_for_turn, name="ledger mutex", daemon=True).start()
            is_late = self._held is None and now - (self._waits_since or now) > _TOO_LONG_S
        if is_late:
            raise busy_too_long(self._folder, _TOO_LONG_S)
        raise LedgerBusy(f"the ledger in {self._folder} is busy")

    def end_turn(self) -> None:
        with self._changing:
            if self._held is not None:
                release_mutex(self._held)
                self._held = None

    def close(self) -> None:
        """Wait no more. `on_turn` is not called again."""
        with self._changing:
            self._is_closed = True
        self.end_turn()

    def _wait_for_turn(self) -> None:
        late_at = time.monotonic() + _TOO_LONG_S
        for pause_s in pauses_s():
            time.sleep(pause_s)
            is_late = time.monotonic() > late_at
            with self._changing:
                if self._is_closed:
                    return
                try:
                    self._held = try_mutex(self._folder) if self.can_use_turn() else None
                    is_over = self._held is not None
                except EnvironmentFault:  # the program finds the same
                    is_over = True
                if is_over:
                    self._waits_since = None
                if is_over or is_late:
                    self.on_turn()
                if is_over:
                    return
            if is_late:
                late_at = math.inf
