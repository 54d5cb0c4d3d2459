"""A file that its holder keeps locked: while the lock is held, somebody of the holder's is alive.

Rules:
- A file gets its name only when it is complete and locked, so whatever bears such a name and is not locked is dead.
- Nobody changes or removes a living file but its holder and its owner. A dead one may be used again, under another
  name: some file systems take long to make a new file where many were removed of late.
- The lock belongs to the open file, not to a process: a child that inherits the descriptor keeps it after its parent
  is gone, and the kernel lets go when the last copy is closed.
- To see whether a file is held, one has to try its lock, and for that moment it seems held to everybody else. So files
  are looked at and made only by whoever keeps all others out.
"""

import contextlib
import errno
import fcntl
import os
import stat
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import ClassVar

from msgspec import Struct

from gpuyard.errors import EnvironmentFault

_MAX_BYTES = 65536
# Gone by now, another user's, a link, a socket.
_NOT_OURS = frozenset({errno.ENOENT, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENXIO, errno.EOPNOTSUPP})


class HeldFile(Struct, frozen=True, kw_only=True):
    """A file somebody holds; its owner is who made it, whatever stands in it."""

    name: str
    uid: int
    made_at: float
    content: bytes
    device: int
    inode: int


class LockFile:
    """Held by this process and by the children that inherit it."""

    _of_this_process: ClassVar["weakref.WeakSet[LockFile]"] = weakref.WeakSet()

    def __init__(
        self, path: str | Path, content: bytes, *, is_inherited: bool = True, spare: str | None = None
    ) -> None:
        """One that is not inherited is this process's alone: a child forked meanwhile does not keep it.

        `spare` is the name of a dead file of this user's in the same folder, to be used again.
        """
        self._folder, self.name = os.path.split(path)
        self.descriptor = -1
        self._pid = os.getpid()
        if not is_inherited:
            self._of_this_process.add(self)
        self.is_used_again = spare is not None and self._use_again(spare, content)
        if not self.is_used_again:
            self._make(content)

    @classmethod
    def leave_in_child(cls) -> None:
        for file in list(cls._of_this_process):
            file.leave()

    @property
    def path(self) -> Path:
        return Path(self._folder, self.name)

    def share(self) -> None:
        """Lets others of this user's keep it too, with `take_over`."""
        fcntl.flock(self.descriptor, fcntl.LOCK_SH)

    def leave(self) -> None:
        """Closes this process's copy only: whoever inherited it or took it over keeps it."""
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)

    def release(self) -> None:
        """Lets go for all who share the lock; in a forked child, only closes its own copy."""
        if self.descriptor >= 0 and self._pid == os.getpid():
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        self.leave()

    def _use_again(self, spare: str, content: bytes) -> bool:
        """Whether that could be done. Nobody looks meanwhile: see above."""
        old = f"{self._folder}/{spare}"
        try:
            self.descriptor = os.open(old, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            if os.fstat(self.descriptor).st_uid != os.geteuid():
                self.leave()
                return False  # whose file it is says whose lease it is
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write_all(self.descriptor, content)
            # Not to nothing first: a file system that sees that writes it out at once, for fear of a crash.
            os.ftruncate(self.descriptor, len(content))
            os.rename(old, f"{self._folder}/{self.name}")
        except OSError:
            self.leave()
            return False
        return True

    def _make(self, content: bytes) -> None:
        unnamed = f"{self._folder}/.{self.name}"
        self.descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.fchmod(self.descriptor, 0o644)  # others have to see what is held, whatever our umask
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write_all(self.descriptor, content)
            os.rename(unnamed, f"{self._folder}/{self.name}")
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unnamed)
            self.leave()
            raise


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=LockFile.leave_in_child)


def take_over(path: Path) -> int:
    """A descriptor that keeps the file held when its first holder, which has to `share` it before, is gone."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise EnvironmentFault(f"the lease {path.stem} cannot be taken over: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        is_gone = os.fstat(descriptor).st_nlink == 0
    except BlockingIOError:
        os.close(descriptor)
        raise EnvironmentFault(f"the lease {path.stem} cannot be taken over: its holder does not share it") from None
    if is_gone:
        os.close(descriptor)
        raise EnvironmentFault(f"the lease {path.stem} cannot be taken over: it has ended")
    return descriptor


def rewrite(path: str, change: Callable[[bytes], bytes]) -> None:
    """Changes what stands in a file of this user's, whoever holds it, in one write that never makes it shorter: a crash
    leaves what stood there before or what stands there now. Spaces at the end of a record mean nothing."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)
        before = os.pread(descriptor, _MAX_BYTES + 1, 0)
        after = change(before).ljust(len(before))
        if os.pwrite(descriptor, after, 0) < len(after):
            os.pwrite(descriptor, before, 0)
            os.ftruncate(descriptor, len(before))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
    finally:
        os.close(descriptor)


def held_files(folder: Path, suffixes: tuple[str, ...], *, dead: list[str] | None = None) -> Iterator[HeldFile]:
    """Those that are held. The names of those whose holders are dead are added to `dead`."""
    place = str(folder)
    for name in sorted(os.listdir(place)):
        found = _look_if_ours(place, name, dead) if name.endswith(suffixes) else None
        if found is not None and not name.startswith("."):
            yield found


def remove_dead(folder: Path, names: Iterable[str]) -> None:
    """Of those that are another user's some may stay."""
    for name in names:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            os.unlink(f"{folder}/{name}")


def _look_if_ours(folder: str, name: str, dead: list[str] | None) -> HeldFile | None:
    try:
        return _look_at(folder, name, dead)
    except OSError as error:
        if error.errno in _NOT_OURS:
            return None
        raise  # no more descriptors, say: a lease that was not seen would be taken for free


def _look_at(folder: str, name: str, dead: list[str] | None) -> HeldFile | None:
    # Without O_NONBLOCK a pipe of that name would stop everybody.
    descriptor = os.open(f"{folder}/{name}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return None
        if not _is_locked(descriptor):
            if dead is not None:
                dead.append(name)
            return None
        return HeldFile(
            name=name,
            uid=status.st_uid,
            made_at=status.st_ctime,
            content=os.pread(descriptor, _MAX_BYTES + 1, 0),
            device=status.st_dev,
            inode=status.st_ino,
        )
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    # Closing would not do where another thread has just forked.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _write_all(descriptor: int, content: bytes) -> None:
    """All or an error: nobody would believe half a record."""
    if len(content) > _MAX_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    if os.write(descriptor, content) < len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
