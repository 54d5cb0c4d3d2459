"""Brings what jobs wrote in a snapshot back to the tree that it was made of, before their ends are reported.

- A result is a file or link that was not copied from the tree, or that has changed since. `__pycache__` is none, and
  nothing that is mounted in the snapshot. On one disk it becomes a hard link in the tree, else a copy.
- A file of the tree that has changed since the submission is never overwritten: the result gets the name of the job
  behind its own, such as `results.csv.job-17`.
- Nothing is written through a symbolic link of the tree. Each file appears whole, and a crash loses none: `brought` in
  the snapshot's folder lists what is in the tree already. The daemon tries again later what failed."""

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from msgspec import Struct

from gpuyard.engines.common.hold_ends import Holds
from gpuyard.ports import Launch
from gpuyard.system.code_snapshot_listing import BROUGHT, FILES, TREE, UNBROUGHT, listing_text, read_listing
from gpuyard.system.folder_tree import FOLDER, Entry, FolderTree, Mounted, mount_of
from gpuyard.system.write_files import write_atomically

_log = logging.getLogger(__name__)
# Size and time of change.
Version = tuple[int, int]


class Brought(Struct, frozen=True, kw_only=True):
    """How many files were brought back; those that got another name; why others could not be, if so."""

    count: int = 0
    renamed: tuple[str, ...] = ()
    problem: str | None = None


def bring_results(snapshot: str, label: str) -> Brought:
    """Bring back what is new in the snapshot `snapshots/NAME`. `label` names the job, such as `job-17`."""
    with contextlib.ExitStack() as opened:
        try:
            folder = opened.enter_context(FolderTree(snapshot))
            fcntl.flock(folder.descriptor, fcntl.LOCK_EX)
            brought = _Bringing(snapshot, label).bring(folder)
        except OSError as error:
            what = " does not exist" if isinstance(error, FileNotFoundError) else f": {error.strerror}"
            brought = Brought(problem=f"{error.filename or snapshot}{what}")
        _note_problem(f"{snapshot}/{UNBROUGHT}", label, brought.problem)
        return brought


def unbrought_results(snapshot: str) -> tuple[str, str] | None:
    """Return the label of the job whose results could not be brought back, and why; None if there are none."""
    try:
        with open(f"{snapshot}/{UNBROUGHT}", encoding="utf-8", errors="surrogateescape") as file:
            label, _, problem = file.read().partition("\n")
    except OSError:
        return None
    return label, problem


def _note_problem(path: str, label: str, problem: str | None) -> None:
    try:
        if problem is None:
            os.unlink(path)
        else:
            write_atomically(path, f"{label}\n{problem}".encode(errors="surrogateescape"), exact_mode=0o600)
    except FileNotFoundError:
        return
    except OSError as error:  # this daemon knows it; a later one only when the snapshot is due
        _log.warning("%s cannot be written: %s", path, error.strerror)


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
        self._problems: list[str] = []
        self._count = 0

    def bring(self, snapshot: FolderTree) -> Brought:
        with contextlib.ExitStack() as opened:
            root: int | None = None
            for entry in snapshot.walk(
                lambda error: self._note(error.filename, error, is_there=not isinstance(error, FileNotFoundError)),
                [TREE],
                skips=lambda path: path == f"{TREE}/.git" or path.endswith("/__pycache__"),
            ):
                path = entry.path.removeprefix(f"{TREE}/")
                if entry.is_folder or not self._is_result(path, entry):
                    continue
                if root is None:
                    root = os.open(self._root, FOLDER)
                    opened.callback(os.close, root)
                try:
                    self._place(root, path, entry)
                    self._count += 1
                except OSError as error:
                    self._note(f"{self._root}/{path}", error, is_there=_status(entry.name, entry.folder) is not None)
        if self._brought != self._before:
            write_atomically(self._list, listing_text(self._root, self._brought.items()), exact_mode=0o600)
        more = f" (and {len(self._problems) - 1:,} more)" if len(self._problems) > 1 else ""
        problem = f"{self._problems[0]}{more}" if self._problems else None
        return Brought(count=self._count, renamed=tuple(self._renamed), problem=problem)

    def _note(self, path: str, error: OSError, *, is_there: bool) -> None:
        """What is mounted in the snapshot is no result, nor is what another job has removed meanwhile."""
        if is_there and not isinstance(error, Mounted):
            self._problems.append(f"{path}: {error.strerror}")

    def _is_result(self, path: str, entry: Entry) -> bool:
        if _version(entry.status) in (self._copied.get(path), self._brought.get(path)):
            return False
        if stat.S_ISLNK(entry.status.st_mode):
            return os.readlink(entry.name, dir_fd=entry.folder) != f"{self._root}/{path}"
        return stat.S_ISREG(entry.status.st_mode)

    def _place(self, root: int, path: str, entry: Entry) -> None:
        above, _, name = path.rpartition("/")
        found = entry.status
        with _folder(root, above) as folder:
            there = _status(name, folder)
            # As at submission, or as it was brought back before: it may be replaced.
            known = (self._copied.get(path), self._brought.get(path), _version(found))
            is_renamed = (
                there is not None
                and not os.path.samestat(there, found)
                and (stat.S_ISDIR(there.st_mode) or _version(there) not in known)
            )
            if is_renamed:
                name = f"{name}.{self._label}"
                there = _status(name, folder)
            if there is None or not (os.path.samestat(there, found) or _version(there) == _version(found)):
                self._put(entry, name, folder)
        self._renamed += [f"{path}.{self._label}"] if is_renamed else []
        self._brought[path] = _version(found)

    def _put(self, entry: Entry, name: str, folder: int) -> None:
        draft = f".{name[:200]}.gpuyard"
        _remove(draft, folder)
        try:
            if stat.S_ISLNK(entry.status.st_mode):
                target = os.readlink(entry.name, dir_fd=entry.folder)
                is_inside = target.startswith(f"{self._tree}/")
                os.symlink(self._root + target.removeprefix(self._tree) if is_inside else target, draft, dir_fd=folder)
            else:
                try:
                    os.link(entry.name, draft, src_dir_fd=entry.folder, dst_dir_fd=folder, follow_symlinks=False)
                except OSError:  # another disk, or one without hard links
                    _copy(entry, draft, folder)
            os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            _remove(draft, folder)
            raise


def _remove(name: str, folder: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def _version(found: os.stat_result) -> Version:
    return found.st_size, found.st_mtime_ns


def _status(name: str, folder: int) -> os.stat_result | None:
    with contextlib.suppress(FileNotFoundError):
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    return None


@contextlib.contextmanager
def _folder(root: int, path: str) -> Iterator[int]:
    """Open a folder of the tree, and make those that are missing. Raises OSError if one is a symbolic link."""
    folder = os.dup(root)
    try:
        for part in filter(None, path.split("/")):
            try:
                inner = os.open(part, FOLDER, dir_fd=folder)
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=folder)
                inner = os.open(part, FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)


def _copy(entry: Entry, name: str, folder: int) -> None:
    """Raises Mounted if another file is mounted in its place."""
    with open(os.open(entry.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=entry.folder), "rb") as source:
        if mount_of(source.fileno()) != mount_of(entry.folder):
            raise Mounted(entry.path)
        found = os.fstat(source.fileno())
        writing = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
        with open(writing, "wb") as target:
            shutil.copyfileobj(source, target)
            target.flush()  # a later write would change the time again
            os.fchmod(writing, stat.S_IMODE(found.st_mode))
            os.utime(writing, ns=(found.st_atime_ns, found.st_mtime_ns))


class SnapshotResults:
    """For one thread. Keys are those of attempts, such as `17.1`."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called, from any thread, when `holds` should be called again."""
        self._looks: Holds[str | None] = Holds(wake)
        self._snapshots: dict[str, str] = {}  # by key
        self._locks: dict[str, threading.Lock] = {}
        self._last: dict[str, tuple[float, str | None]] = {}  # by snapshot: when its last look began, and its problem

    def note(self, launch: Launch) -> None:
        if launch.snapshot is not None:
            self._snapshots[launch.key] = os.path.dirname(launch.snapshot.folder)

    def holds(self, key: str) -> bool:
        """Return whether the end of this attempt is held back, for 30 s at most, as the disk may hang."""
        snapshot = self._snapshots.get(key)
        if snapshot is None:
            return False
        lock, label = self._locks.setdefault(snapshot, threading.Lock()), f"job-{key.partition('.')[0]}"
        return self._looks.holds(key, partial(self._bring, snapshot, label, lock, time.monotonic()), 30.0)

    def take_problem(self, key: str) -> str | None:
        """Return why results were not brought back, once `holds` has returned False."""
        self._snapshots.pop(key, None)
        return self._looks.take(key)

    def _bring(self, snapshot: str, label: str, lock: threading.Lock, ended_at: float) -> str | None:
        with lock:
            began_at, problem = self._last.get(snapshot, (float("-inf"), None))
            if began_at < ended_at:  # else a look for another attempt was for this one too
                began_at, brought = time.monotonic(), bring_results(snapshot, label)
                self._last[snapshot] = began_at, (problem := brought.problem)
                if problem is not None:
                    _log.warning("results of %s stay in %s for now: %s", label, snapshot, problem)
                for path in brought.renamed:
                    _log.warning("a result of %s is %s: the file has changed in the tree, too", label, path)
        return problem
