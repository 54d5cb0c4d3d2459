"""A file that its holder keeps locked: while the lock is held, a process of the holder is alive.

Rules:
- A file gets its name only when it is complete and locked, so an unlocked file with such a name is dead.
- Only its holder and its owner change or remove a live file. A dead file may be used again under another name: some
  file systems take long to create a file after many were removed.
- The lock belongs to the open file, not to a process: a child that inherits the descriptor keeps the lock after its
  parent has ended, and the kernel releases it when the last copy is closed.
- To see whether a file is held, a process has to try its lock, and meanwhile the file seems held to all others. So
  files are read and made only under the ledger's mutex.
"""

import contextlib
import errno
import fcntl
import os
import stat
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from msgspec import Struct

from gpuyard.errors import EnvironmentFault
from gpuyard.system.file_locks import has_name, try_lock, unlock

_MAX_BYTES = 65536
# Removed meanwhile, another user's, a symbolic link, a socket.
_SKIPPED_ERRORS = frozenset({errno.ENOENT, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENXIO, errno.EOPNOTSUPP})


class HeldFile(Struct, frozen=True, kw_only=True):
    """A file that is held. `uid` is the owner of the file, which the content cannot change."""

    name: str
    uid: int
    made_at: float
    content: bytes
    device: int
    inode: int

    @property
    def id(self) -> str:
        return self.name.rpartition(".")[0]


class LockFile:
    """A file held by this process and by the children that inherit it."""

    _not_inherited: ClassVar["weakref.WeakSet[LockFile]"] = weakref.WeakSet()

    def __init__(
        self, path: str | Path, content: bytes, *, is_inherited: bool = True, spare: str | None = None
    ) -> None:
        """Make the file and lock it. Without `is_inherited`, forked children close their copy.

        `spare` is the name of a dead file in the same directory, which is used again if it is this user's.
        """
        self._folder, self.name = os.path.split(path)
        self.descriptor = -1
        self._pid = os.getpid()
        if not is_inherited:
            self._not_inherited.add(self)
        self.is_used_again = spare is not None and self._use_again(spare, content)
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

    def share(self) -> None:
        """Let other processes of this user keep the file too, with `take_over`."""
        fcntl.flock(self.descriptor, fcntl.LOCK_SH)

    def leave(self) -> None:
        """Close this process's copy only; processes that inherited it or took it over keep it."""
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)

    def release(self) -> None:
        """Remove the file and unlock it for all processes that share the lock. In a forked child: only leave it."""
        if self.descriptor >= 0 and self._pid == os.getpid():
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()
            unlock(self.descriptor)
        self.leave()

    def _use_again(self, spare: str, content: bytes) -> bool:
        """Rename and overwrite a dead file. Return False if that fails. Needs the mutex, as said above."""
        old = f"{self._folder}/{spare}"
        try:
            self.descriptor = os.open(old, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            if os.fstat(self.descriptor).st_uid != os.geteuid():
                self.leave()
                return False  # the owner of the file is the owner of the lease
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write_all(self.descriptor, content)
            # Never truncate to 0 bytes: some file systems then flush the file to disk at once.
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
            os.fchmod(self.descriptor, 0o644)  # other users have to read it, whatever our umask
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
    """Return a descriptor that keeps the file held after its first holder has ended.

    Raises EnvironmentFault unless the holder has called `share` and the file still exists.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise EnvironmentFault(f"the lease {path.stem} cannot be taken over: {error.strerror}") from error
    if try_lock(descriptor, shared=True) and has_name(descriptor):
        return descriptor
    why = "its holder does not share it" if has_name(descriptor) else "it has ended"
    os.close(descriptor)
    raise EnvironmentFault(f"the lease {path.stem} cannot be taken over: {why}")


def rewrite(path: str, change: Callable[[bytes], bytes]) -> None:
    """Replace the content of a file of this user, also if another process holds it.

    One write that never shortens the file: a crash leaves the old content or the new. Records ignore trailing spaces.
    """
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


def held_files(folder: Path, suffixes: tuple[str, ...], dead: list[str]) -> Iterator[HeldFile]:
    """Yield the files that are held, and add the names of dead files to `dead`."""
    for name in sorted(os.listdir(folder)):
        try:
            found = _read_held(str(folder), name, dead) if name.endswith(suffixes) else None
        except OSError as error:
            if error.errno in _SKIPPED_ERRORS:
                continue
            raise  # for example no free descriptors: skipping a lease would make its devices seem free
        if found is not None and not name.startswith("."):
            yield found


def remove_dead(folder: Path, names: Iterable[str]) -> None:
    """Remove dead files. In a sticky directory those of other users stay."""
    for name in names:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            os.unlink(f"{folder}/{name}")


def _read_held(folder: str, name: str, dead: list[str]) -> HeldFile | None:
    # Without O_NONBLOCK opening a pipe of that name would block.
    descriptor = os.open(f"{folder}/{name}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return None
        if try_lock(descriptor):
            unlock(descriptor)
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


def _write_all(descriptor: int, content: bytes) -> None:
    """Write the whole content or raise: half a record would be ignored."""
    if len(content) > _MAX_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    if os.write(descriptor, content) < len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class LockTable:
    """Who holds each file lock according to the kernel: no user can keep another user's dead lease alive.

    The locks are read when first needed, as that takes longer than reading the ledger.
    """

    def __init__(self, source: Path = Path("/proc/locks")) -> None:
        self._source = source

    def is_held_for(self, uid: int, maker: int, device: int, inode: int) -> bool:
        """Return whether a process of the file's owner, `uid`, or of root holds the lock.

        Return True if the kernel does not know the holder: it is in another container, it has ended and left the lock
        to its children, or this is not Linux. The user of `maker`, the pid that made the file, is not checked: if that
        process has ended and left the lock to its children, another user's process may have its pid.
        """
        pids = self.pids.get((os.major(device), os.minor(device), inode), ())
        return not pids or any(pid == maker or _uid_of(pid) in (None, uid, 0) for pid in pids)

    @cached_property
    def pids(self) -> dict[tuple[int, int, int], tuple[int, ...]]:
        """The pids of the processes that locked a file, by the file's device (major, minor) and inode.

        Empty if the kernel does not list locks.
        """
        try:
            lines = self._source.read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:
            return {}
        table: dict[tuple[int, int, int], tuple[int, ...]] = {}
        for fields in map(str.split, lines):
            if len(fields) >= 6 and fields[1] == "FLOCK" and fields[5].count(":") == 2:
                major, minor, inode = fields[5].split(":")
                key = (int(major, 16), int(minor, 16), int(inode))
                table[key] = (*table.get(key, ()), int(fields[4]))
        return table


def _uid_of(pid: int) -> int | None:
    """Return the real uid from the status file: /proc/PID itself belongs to root if the process is not dumpable."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("Uid:")), None)
