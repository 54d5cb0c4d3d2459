"""Finds the files of a ledger that are held, at a limited cost: users can leave thousands in a shared directory.

- Of a user with many files, only the newest `MAX_FILES_PER_USER` are read, and no more than `MAX_MB_PER_USER`; a file
with many names is read once. A file that cannot be read is named and passed over.
- A file that was not held once never is again: files get their names when they are locked. A scan remembers them."""

import contextlib
import errno
import os
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

from gpuyard.ledger.drains_and_marks import DRAIN, MARK
from gpuyard.ledger.lock_file import LEASE, SKIPPED_ERRORS, TICKET, HeldFile, read_held

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
