"""A file that its holder keeps locked: while the lock is held, a process of the holder is alive.

- A file gets its name only when it is complete and locked, so an unlocked file with such a name is dead. A dead file
may be used again under another name: some file systems take long to create one after many were removed.
- A child that inherits the descriptor keeps the lock after its parent has ended.
- Only the owner of a file (and root) can hold, change or remove it: it is closed to other users until it is locked.
Reading takes no lock (`system/file_locks.py`), nor the ledger's mutex; files are made, used again and removed under it.
- Files of another machine that sees the same directory do not count, and are never removed: locks may be local to it.
"""

import contextlib
import errno
import logging
import os
import stat
import time
import weakref
from collections.abc import Callable, Container
from pathlib import Path
from typing import ClassVar

import msgspec
from msgspec import Struct

from gpuyard.model.lease import Holder
from gpuyard.system import file_locks as owner_locks
from gpuyard.system.file_locks import DeferInterrupts
from gpuyard.system.processes import boot_id, machine_name

_log = logging.getLogger(__name__)

LEASE, TICKET = ".lease", ".ticket"
MAX_BYTES = 65536
# Errors on opening a file in a shared directory: removed meanwhile, another user's, a symbolic link, a socket, or its
# owner has asked the kernel to delay all who open it (F_SETLEASE), which is impossible while a process holds the file.
SKIPPED_ERRORS = frozenset(
    {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENXIO, errno.EOPNOTSUPP, errno.EAGAIN}
)
# The holder of a ticket calls `beat` at least this often while it waits.
BEAT_EVERY_S = 5.0


class _AnyRecord(Struct, frozen=True):
    holder: Holder


def is_elsewhere(content: bytes) -> bool:
    """Return whether a record names a holder on another machine. False for what is not a record."""
    boot = boot_id()
    if boot is None or boot.encode() in content:
        return False
    try:
        holder = msgspec.json.decode(content, type=_AnyRecord).holder
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return holder.boot_id not in (None, boot) and holder.machine not in (None, machine_name())


class HeldFile(Struct, frozen=True, kw_only=True):
    """A held file of the user `uid`. `is_idle`: a ticket whose holder has not shown for a while that it runs."""

    name: str
    uid: int
    made_at: float
    content: bytes
    is_idle: bool = False

    @property
    def id(self) -> str:
        return self.name.rpartition(".")[0]


class LockFile:
    """A file held by this process and by the children that inherit it. An object that is dropped is left, so that an
    interrupt before its assignment leaves nothing held."""

    descriptor = -1
    _beaten_at = 0.0
    _not_inherited: ClassVar["weakref.WeakSet[LockFile]"] = weakref.WeakSet()

    def __init__(self, path: str | Path, content: bytes, *, is_inherited: bool = True, spare: str = "") -> None:
        """Make the file and lock it. Without `is_inherited`, forked children close it. `spare`: a dead file to use."""
        self._folder, self.name = os.path.split(path)
        self._pid = os.getpid()
        if not is_inherited:
            self._not_inherited.add(self)
        self.is_used_again = bool(spare) and self._use_again(spare, content)
        if not self.is_used_again:
            self._make(content)

    @classmethod
    def leave_in_child(cls) -> None:
        for file in list(cls._not_inherited):
            file.leave()

    @property
    def id(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def path(self) -> Path:
        return Path(self._folder, self.name)

    def leave(self) -> None:
        """Close this process's copy only; processes that inherited it keep it."""
        if self.descriptor >= 0:
            os.close(self.detach())

    __del__ = leave

    def detach(self) -> int:
        """Return the descriptor, which the caller closes from now on."""
        descriptor, self.descriptor = self.descriptor, -1
        return descriptor

    def beat(self) -> None:
        """Show that the holder of a ticket is running."""
        now = time.monotonic()
        if self.descriptor >= 0 and now >= self._beaten_at + BEAT_EVERY_S:
            owner_locks.beat(self.descriptor)
            self._beaten_at = now

    def release(self) -> None:
        """Remove the file and unlock it for all processes that share the lock. In a forked child: only leave it.
        Without the lock the file is dead: one that cannot be removed holds nothing, and a later claim removes it."""
        with DeferInterrupts():
            if self.descriptor >= 0 and self._pid == os.getpid():
                try:
                    os.unlink(f"{self._folder}/{self.name}")
                except FileNotFoundError:
                    pass
                except OSError as error:
                    _log.warning("the lease file %s has ended, but cannot be removed: %s", self.path, error.strerror)
                finally:
                    owner_locks.unhold(self.descriptor)
            self.leave()

    def _use_again(self, spare: str, content: bytes) -> bool:
        """Overwrite and rename a dead file. Return False if that fails. Needs the mutex, as said above. The file is
        complete before it is locked, as other processes may read it at any moment."""
        old = f"{self._folder}/{spare}"
        try:
            self.descriptor = os.open(old, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            status = os.fstat(self.descriptor)
            # The owner of the file is the owner of the lease. A file with two names is in another directory, too.
            if status.st_uid != os.geteuid() or status.st_nlink > 1 or owner_locks.is_held(self.descriptor):
                self.leave()
                return False
            _write_all(self.descriptor, content)
            # Never truncate to 0 bytes: some file systems then flush the file to disk at once.
            os.ftruncate(self.descriptor, len(content))
            if self._hold():
                os.rename(old, f"{self._folder}/{self.name}")
                return True
        except OSError:
            pass
        self.leave()
        return False

    def _hold(self) -> bool:
        if not owner_locks.try_hold(self.descriptor):
            return False
        if self.name.endswith(TICKET):
            self.beat()
        return True

    def _make(self, content: bytes) -> None:
        unnamed = f"{self._folder}/.{self.name}"
        self.descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if not self._hold():
                raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), unnamed)
            _write_all(self.descriptor, content)
            os.fchmod(self.descriptor, 0o644)  # other users have to read it, whatever our umask
            os.rename(unnamed, f"{self._folder}/{self.name}")
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unnamed)
            self.leave()
            raise


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=LockFile.leave_in_child)


def rewrite(path: str, change: Callable[[bytes], bytes]) -> None:
    """Replace the content of a file of this user, also if another process holds it. One write that never shortens the
    file: a crash leaves the old content or the new. Records ignore trailing spaces."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)
        before = os.pread(descriptor, MAX_BYTES + 1, 0)
        after = change(before).ljust(len(before))
        if os.pwrite(descriptor, after, 0) < len(after):
            os.pwrite(descriptor, before, 0)
            os.ftruncate(descriptor, len(before))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
    finally:
        os.close(descriptor)


def read_held(folder: str, name: str, unread: Container[int] = ()) -> tuple[int | None, HeldFile | None]:
    """Return the owner and the content of a file that is held; only the owner if it is dead, and nothing if it is not a
    file, or another machine's. Of users in `unread`, a held file is returned with no content. Raises OSError."""
    # Without O_NONBLOCK opening a pipe of that name would block.
    descriptor = os.open(f"{folder}/{name}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return None, None
        is_held = owner_locks.is_held(descriptor)
        # After the test: a dead file may just be used again.
        content = b"" if is_held and status.st_uid in unread else os.pread(descriptor, MAX_BYTES + 1, 0)
        if is_elsewhere(content):
            return None, None
        if not is_held:
            return status.st_uid, None
        # A ticket without a beat for 30 s is idle: its process is stopped, or hangs.
        is_idle = name.endswith(TICKET) and not owner_locks.has_beaten(descriptor, 30)
        uid = status.st_uid
        return uid, HeldFile(name=name, uid=uid, made_at=status.st_ctime, content=content, is_idle=is_idle)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, content: bytes) -> None:
    """Write the whole content or raise: half a record would be ignored."""
    if len(content) > MAX_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    if os.write(descriptor, content) < len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
