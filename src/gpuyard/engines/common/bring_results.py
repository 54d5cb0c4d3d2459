"""Brings what jobs wrote in a snapshot back to the tree that it was made of.

- A result is a file or link that was not copied from the tree, or that has changed since. `__pycache__` is none.
- On one disk a result is a hard link in the tree: what a job goes on writing to it is there, too. Else it is a copy,
  which is made again if the file changes.
- A file of the tree that has changed since the submission is never overwritten: the result gets the name of the job
  behind its own, such as `results.csv.job-17`.
- Nothing is written through a symbolic link of the tree. Each file appears whole, and a crash loses none.
- It may be called again at any time: `brought` in the snapshot's folder lists what is in the tree already.
"""

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator

from msgspec import Struct

from gpuyard.system.atomic_files import write_atomically
from gpuyard.system.folder_tree import FOLDER
from gpuyard.system.snapshot_files import BROUGHT, FILES, TREE, listing_text, read_listing

_NO_RESULT = "__pycache__"
_CHUNK = 1 << 20
# Size and time of change.
Version = tuple[int, int]


class Brought(Struct, frozen=True, kw_only=True):
    """How many files were brought back; those that got another name; why others could not be, if so."""

    count: int = 0
    renamed: tuple[str, ...] = ()
    problem: str | None = None


def bring_results(snapshot: str, label: str) -> Brought:
    """Bring back what is new in the snapshot `snapshots/NAME`. `label` names the job, such as `job-17`."""
    try:
        with _locked(snapshot):
            return _Bringing(snapshot, label).bring()
    except FileNotFoundError as error:
        return Brought(problem=f"{error.filename} does not exist")
    except OSError as error:
        return Brought(problem=f"{error.filename or snapshot}: {error.strerror}")


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    descriptor = os.open(folder, FOLDER)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class _Bringing:
    def __init__(self, snapshot: str, label: str) -> None:
        self._tree, self._label = f"{snapshot}/{TREE}", label
        self._list = f"{snapshot}/{BROUGHT}"
        self._root, self._copied = read_listing(f"{snapshot}/{FILES}")
        self._before: dict[str, Version] = {}
        with contextlib.suppress(FileNotFoundError):
            self._before = read_listing(self._list)[1]
        self._brought = dict(self._before)
        self._renamed: list[str] = []
        self._problem: str | None = None
        self._count = 0

    def bring(self) -> Brought:
        with contextlib.ExitStack() as opened:
            root: int | None = None
            for path, found in self._results():
                if root is None:
                    root = os.open(self._root, FOLDER)
                    opened.callback(os.close, root)
                try:
                    self._place(root, path, found)
                    self._count += 1
                except OSError as error:
                    self._problem = f"{self._root}/{path}: {error.strerror}"
        if self._brought != self._before:
            write_atomically(self._list, listing_text(self._root, self._brought.items()), exact_mode=0o600)
        return Brought(count=self._count, renamed=tuple(self._renamed), problem=self._problem)

    def _results(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the paths and status of all results that are not in the tree yet."""
        pending = [""]
        while pending:
            at = pending.pop()
            with os.scandir(f"{self._tree}/{at}") as entries:
                for entry in entries:
                    path = at + entry.name
                    if entry.name == _NO_RESULT or path == ".git":
                        continue
                    found = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(found.st_mode):
                        pending.append(f"{path}/")
                    elif self._is_result(path, found):
                        yield path, found

    def _is_result(self, path: str, found: os.stat_result) -> bool:
        version = _version(found)
        if version in (self._copied.get(path), self._brought.get(path)):
            return False
        if stat.S_ISLNK(found.st_mode):
            return os.readlink(f"{self._tree}/{path}") != f"{self._root}/{path}"
        return stat.S_ISREG(found.st_mode)

    def _place(self, root: int, path: str, found: os.stat_result) -> None:
        above, _, name = path.rpartition("/")
        with _folder(root, above) as folder:
            there = _status(name, folder)
            if there is not None and not os.path.samestat(there, found) and not self._may_replace(path, there, found):
                name = f"{name}.{self._label}"
                self._renamed.append(f"{path}.{self._label}")
                there = _status(name, folder)
            if there is None or not (os.path.samestat(there, found) or _version(there) == _version(found)):
                self._put(path, found, name, folder)
        self._brought[path] = _version(found)

    def _may_replace(self, path: str, there: os.stat_result, found: os.stat_result) -> bool:
        """Return whether the file of the tree is as it was at submission, or as it was brought back before."""
        known = (self._copied.get(path), self._brought.get(path), _version(found))
        return not stat.S_ISDIR(there.st_mode) and _version(there) in known

    def _put(self, path: str, found: os.stat_result, name: str, folder: int) -> None:
        source, draft = f"{self._tree}/{path}", f".{name[:200]}.gpuyard"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft, dir_fd=folder)
        if stat.S_ISLNK(found.st_mode):
            target = os.readlink(source)
            inside = target.startswith(f"{self._tree}/")
            os.symlink(self._root + target.removeprefix(self._tree) if inside else target, draft, dir_fd=folder)
        else:
            try:
                os.link(source, draft, dst_dir_fd=folder, follow_symlinks=False)
            except OSError:  # another disk, or one without hard links
                _copy(source, draft, folder)
        os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)


def _version(found: os.stat_result) -> Version:
    return found.st_size, found.st_mtime_ns


def _status(name: str, folder: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _folder(root: int, path: str) -> Iterator[int]:
    """Open a folder of the tree, and make those that are missing. Raises OSError if one is a symbolic link."""
    with contextlib.ExitStack() as opened:
        folder = root
        for part in filter(None, path.split("/")):
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, dir_fd=folder)
            folder = os.open(part, FOLDER, dir_fd=folder)
            opened.callback(os.close, folder)
        yield folder


def _copy(source: str, name: str, folder: int) -> None:
    reading = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(reading)
        writing = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            while content := os.read(reading, _CHUNK):
                left = memoryview(content)
                while left:
                    left = left[os.write(writing, left) :]
            os.fchmod(writing, stat.S_IMODE(found.st_mode))
            os.utime(writing, ns=(found.st_atime_ns, found.st_mtime_ns))
        finally:
            os.close(writing)
    finally:
        os.close(reading)
