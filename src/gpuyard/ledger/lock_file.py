"""A file that its holder keeps locked: while the lock is held, a process of the holder is alive.

- A file gets its name only when it is complete and locked, so an unlocked file with such a name is dead. A dead file
may be used again under another name: some file systems take long to create one after many were removed.
- A child that inherits the descriptor keeps the lock after its parent has ended.
- Only the owner of a file (and root) can hold, change or remove it: it is closed to other users until it is locked.
Reading takes no lock (`system/file_locks.py`), nor the ledger's mutex; files are made, used again and removed under it.
- Files of another machine that sees the same directory do not count, and are never removed: locks may be local to it.
- A scan finds the held files at a limited cost: users can leave thousands in a shared directory. Of a user with many
files, only the newest `MAX_FILES_PER_USER` are read, and no more than `MAX_MB_PER_USER`; a file with many names is read
once. A file that cannot be read is named and passed over. A file that was not held once never is again: a scan
remembers it."""

import contextlib
import errno
import logging
import os
import stat
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import ClassVar

import msgspec
from msgspec import Struct

from gpuyard.model.lease import Holder
from gpuyard.system import file_locks as owner_locks
from gpuyard.system.file_locks import DeferInterrupts
from gpuyard.system.processes import boot_id, machine_name

_log = logging.getLogger(__name__)

LEASE, TICKET, DRAIN, MARK = ".lease", ".ticket", ".drain", ".health"  # the endings of all files in the directory
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


MAX_FILES_PER_USER, MAX_MB_PER_USER = 4096, 8


def remove_dead(folder: Path) -> None:
    """Remove the dead files of this user, of a directory that it has left. Needs the mutex."""
    scan = LedgerScan(folder)
    with contextlib.suppress(OSError):
        list(scan.held_files())
        scan.remove_dead()


class LedgerScan:
    """Scans one directory. Each scan notes in `dead` the files that this user can remove, in `unread` how many were not
    read, by user, in `unreadable` why, by name, and in `drains` and `marks` the inodes of those files, by name."""

    def __init__(self, folder: Path) -> None:
        self.dead: list[str] = []
        self.unread: Counter[int] = Counter()
        self.unreadable: dict[str, str] = {}
        self.drains: dict[str, int] = {}
        self.marks: dict[str, int] = {}
        self._folder = str(folder)
        self._not_held: set[tuple[str, int]] = set()

    def held_files(self) -> Iterator[HeldFile]:
        """Yield the files that are held, by name."""
        self.dead, self.unread, self.unreadable = [], Counter(), {}
        with os.scandir(self._folder) as entries:
            found_files = {entry.name: entry.inode() for entry in entries}
        self.drains = {name: inode for name, inode in found_files.items() if name.endswith(DRAIN)}
        self.marks = {name: inode for name, inode in found_files.items() if name.endswith(MARK)}
        self._not_held.intersection_update(found_files.items())
        pairs = (each for each in found_files.items() if each not in self._not_held)
        files = {name: inode for name, inode in pairs if name.endswith((LEASE, TICKET))}
        names: Iterable[str] = files
        if len(files) > MAX_FILES_PER_USER:
            names = self._newest_per_user(files)
        left = defaultdict[int, int](lambda: MAX_MB_PER_USER << 20)
        others, over = set[int](), set[int]()  # inodes, and users of whom enough was read
        for name in sorted(names):
            if files[name] in others:
                continue
            found = self._read(name, files[name], over)
            if found is not None and found.uid != os.geteuid():
                others.add(files[name])
                left[found.uid] -= len(found.content)
                if left[found.uid] < 0:
                    over.add(found.uid)
                    self.unread[found.uid] += 1
                    continue
            if found is not None:
                yield found

    def _read(self, name: str, inode: int, unread: Container[int]) -> HeldFile | None:
        """Return a file that is held and complete; of users in `unread`, without its content."""
        try:
            uid, found = read_held(self._folder, name, unread)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise  # a lease that is not read for such a reason makes its devices seem free
            if error.errno in SKIPPED_ERRORS:
                self._not_held.add((name, inode))
            else:
                self.unreadable[name] = os.strerror(error.errno or 0)
            return None
        if found is not None:
            return None if name.startswith(".") else found
        # `uid` is None for what is not a file, such as a pipe, or is another machine's: it stays.
        if uid is not None and os.geteuid() in (uid, 0, os.stat(self._folder).st_uid):
            self.dead.append(name)
        else:
            self._not_held.add((name, inode))
        return None

    def remove_dead(self) -> None:
        """Remove the dead files of the last scan, up to 10,000. Needs the mutex."""
        for name in self.dead[:10_000]:
            with contextlib.suppress(FileNotFoundError, PermissionError):
                os.unlink(f"{self._folder}/{name}")
        self.dead = []

    def _newest_per_user(self, names: Iterable[str]) -> list[str]:
        files: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
        for name in names:
            try:
                status = os.lstat(f"{self._folder}/{name}")
            except OSError as error:
                if error.errno != errno.ENOENT:
                    self.unreadable[name] = os.strerror(error.errno or 0)
                continue
            files[status.st_uid].append((status.st_ctime_ns, name))
        for uid, found in files.items():
            if len(found) > MAX_FILES_PER_USER and uid != os.geteuid():
                self.unread[uid] = len(found) - MAX_FILES_PER_USER
                found.sort()
                del found[:-MAX_FILES_PER_USER]
        return [name for found in files.values() for _, name in found]
