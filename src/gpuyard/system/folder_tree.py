"""A folder and all in it, used by descriptors: whole folders are read, copied and removed here.

- No path below the folder follows a symbolic link, even one that another user puts there meanwhile.
- A mount is never entered or removed: what is mounted belongs to someone else, though it may be on the same disk.
- Folders may be nested at any depth. Two descriptors are open at a time.
- Paths are relative to the folder, and "." is the folder itself. Errors name the whole path."""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn, Self

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# O_PATH needs no permission, and does not ask the program behind a mount, which may hang. Only Linux has it.
_PLACE = getattr(os, "O_PATH", os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC
_IS_LINUX = hasattr(os, "O_PATH")


class LeftAlone(OSError):
    """What is at the path is never removed: it is another user's, or mounted there."""


class Mounted(LeftAlone):
    def __init__(self, path: str) -> None:
        super().__init__(errno.EXDEV, "is a mount, which gpuyard leaves alone; unmount it first", path)


class Entry(NamedTuple):
    """An entry of the tree. `folder` is a descriptor of the folder that holds it, open until the next entry."""

    folder: int
    name: str
    path: str
    status: os.stat_result

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.status.st_mode)


class _FolderLevel(NamedTuple):
    """A folder that the walk is in. `left`: names that it has not come to, and whether they are folders."""

    name: str
    path: str
    status: os.stat_result
    left: list[tuple[str, bool]]


def raise_it(problem: OSError) -> NoReturn:
    """For `FolderTree.walk`: end the walk at the first problem."""
    raise problem


class FolderTree:
    """Is closed at the end of a `with` block. Raises OSError if the path is not a folder, but a link to one, unless it
    `follows` links."""

    def __init__(self, path: str | Path, *, follows: bool = False) -> None:
        self._path = str(path)
        self.descriptor = os.open(path, FOLDER & ~os.O_NOFOLLOW if follows else FOLDER)
        self._last, self._last_path = os.dup(self.descriptor), ""  # the folder that `at` was in
        self._mount = mount_of(self.descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._last)
        os.close(self.descriptor)

    def name(self, path: str) -> str:
        """Return the whole path, for messages."""
        return self._path if path == "." else f"{self._path}/{path}"

    @property
    def is_ours(self) -> bool:
        return os.fstat(self.descriptor).st_uid == os.geteuid()

    @contextlib.contextmanager
    def at(self, path: str) -> Iterator[tuple[int, str]]:
        """Yield a descriptor of the folder that `path` is in, and its name there."""
        above, _, name = path.rpartition("/")
        try:
            # The folder is kept open: the next path is often in it, or below.
            if not f"{above}/".startswith(f"{self._last_path}/" if self._last_path else ""):
                os.close(self._last)
                self._last, self._last_path = os.dup(self.descriptor), ""
            for part in filter(None, above[len(self._last_path) :].split("/")):
                inner = open_folder(part, self._last, self._mount)
                os.close(self._last)
                self._last, self._last_path = inner, f"{self._last_path}/{part}".lstrip("/")
            yield self._last, name
        except OSError as error:
            error.filename = self.name(path)
            raise

    def status(self, path: str) -> os.stat_result:
        with self.at(path) as (folder, name):
            return os.stat(name, dir_fd=folder, follow_symlinks=False)

    def link(self, path: str) -> str:
        with self.at(path) as (folder, name):
            return os.readlink(name, dir_fd=folder)

    @contextlib.contextmanager
    def open(self, path: str, flags: int = _READ) -> Iterator[int]:
        with self.at(path) as (folder, name):
            descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
            try:
                yield descriptor
            finally:
                os.close(descriptor)

    def paths(self) -> list[str]:
        """Return the paths of all entries, a folder before its own entries. Raises Mounted if one is a mount."""
        paths = []
        for entry in self.walk(raise_it):
            if not entry.is_folder and is_mount(entry.name, entry.folder):
                raise Mounted(self.name(entry.path))
            paths.append(entry.path)
        return [".", *reversed(paths)]

    def walk(
        self,
        on_problem: Callable[[OSError], object],
        names: Iterable[str] | None = None,
        *,
        skips: Callable[[str], bool] = lambda _: False,
        unlocks: bool = False,
    ) -> Iterator[Entry]:
        """Yield all entries, a folder after its own entries. `names`: only these entries of the folder, and all below.
        What was removed meanwhile is left out. Calls `on_problem` for a folder that cannot be entered, such as a mount
        (`Mounted`), or that was moved meanwhile (FileNotFoundError): it is not yielded, and the walk goes on. Paths for
        which `skips` is true are left out, with all below. `unlocks`: give ourselves all permissions on our folders; a
        folder of another user is then a problem (`LeftAlone`)."""
        with contextlib.closing(_Walk(self.descriptor, self._mount, names, unlocks=unlocks)) as walk:
            while walk.levels:
                level = walk.levels[-1]
                path = level.path
                try:
                    if not level.left:
                        entry = walk.leave()
                    else:
                        name, is_folder = level.left.pop()
                        path = f"{level.path}/{name}" if level.path else name
                        entry = None if skips(path) else walk.visit(name, path, is_folder=is_folder)
                except OSError as error:
                    error.filename = self.name(path)
                    on_problem(error)
                    continue
                if entry is not None:
                    yield entry


class _Walk:
    """`here` is a descriptor of the folder of the last level."""

    def __init__(self, root: int, mount: int, names: Iterable[str] | None, *, unlocks: bool) -> None:
        self._root, self._mount, self._unlocks = root, mount, unlocks
        self._here = os.dup(root)
        left = _entries(root) if names is None else [(name, _is_folder(name, root)) for name in names]
        self.levels = [_FolderLevel("", "", os.fstat(root), left)]

    def close(self) -> None:
        os.close(self._here)

    def visit(self, name: str, path: str, *, is_folder: bool) -> Entry | None:
        """Return the entry, or None if it is a folder, which is entered, or was removed."""
        try:
            if not is_folder:
                return Entry(self._here, name, path, os.stat(name, dir_fd=self._here, follow_symlinks=False))
            inner = open_folder(name, self._here, self._mount, unlocks=self._unlocks)
        except FileNotFoundError:
            return None
        try:
            self.levels.append(_FolderLevel(name, path, os.fstat(inner), _entries(inner)))
        except BaseException:
            os.close(inner)
            raise
        self._move_to(inner)
        return None

    def leave(self) -> Entry | None:
        """Go back to the folder above. Return the entry of the folder that was left, or None for the root."""
        left = self.levels.pop()
        if not self.levels:
            return None
        if self._try_to_move("..", self.levels[-1]):
            return Entry(self._here, left.name, left.path, left.status)
        self._move_to(os.dup(self._root))  # and down to the last folder that is where it was
        for depth, level in enumerate(self.levels[1:], 1):
            if not self._try_to_move(level.name, level):
                del self.levels[depth:]
                break
        raise FileNotFoundError(errno.ENOENT, "it was moved or removed meanwhile")

    def _try_to_move(self, name: str, level: _FolderLevel) -> bool:
        """Return whether the name is the folder of this level."""
        try:
            folder = os.open(name, FOLDER, dir_fd=self._here)
        except OSError:
            return False
        if not os.path.samestat(os.fstat(folder), level.status):
            os.close(folder)
            return False
        self._move_to(folder)
        return True

    def _move_to(self, folder: int) -> None:
        os.close(self._here)
        self._here = folder


def remove_tree(path: str | Path) -> list[OSError]:
    """Remove a folder with all in it, also where it is read-only. Return why something stays, such as a link."""
    above, name = os.path.split(path)
    with FolderTree(above or ".", follows=True) as tree:
        if _is_folder(name, tree.descriptor) or not os.path.lexists(path):
            return remove_entries(tree, [name])
        return [NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))]


def remove_entries(tree: FolderTree, names: Iterable[str], *, keeps_others: bool = False) -> list[OSError]:
    """Remove entries of a folder with all in them. Return why something stays; all else is removed nevertheless. Mounts
    and folders of other users stay, and so do the folders that hold them; with `keeps_others`, also their files."""
    problems: list[OSError] = []
    staying: set[str] = set()  # folders with something that stays

    def note(problem: OSError) -> None:
        problems.append(problem)
        staying.add(os.path.dirname(problem.filename))

    for entry in tree.walk(note, names, unlocks=True):
        path = tree.name(entry.path)
        if path in staying:
            staying.add(os.path.dirname(path))
            continue
        try:
            if keeps_others:
                _refuse_others(entry.status, path)
            (os.rmdir if entry.is_folder else os.unlink)(entry.name, dir_fd=entry.folder)
        except FileNotFoundError:
            continue
        except OSError as error:
            error.filename = path
            note(Mounted(path) if error.errno == errno.EBUSY and is_mount(entry.name, entry.folder) else error)
    return problems


def mount_of(descriptor: int) -> int:
    """Return the id of the mount that an open file is in: a bind mount has one of its own, but its source's device.
    Only Linux tells it; elsewhere return the device."""
    try:
        with open(f"/proc/self/fdinfo/{descriptor}", "rb", buffering=0) as info:
            _, found, rest = info.read(4096).partition(b"mnt_id:")
    except FileNotFoundError:
        found = b""
    return int(rest.split(maxsplit=1)[0]) if found else os.fstat(descriptor).st_dev


def is_mount(name: str, folder: int) -> bool:
    """Return whether something, such as a file, is mounted at the name."""
    if not _IS_LINUX:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_dev != os.fstat(folder).st_dev
    place = os.open(name, _PLACE, dir_fd=folder)
    try:
        return mount_of(place) != mount_of(folder)
    finally:
        os.close(place)


def open_folder(name: str, folder: int, mount: int, *, unlocks: bool = False) -> int:
    """Open a folder of this mount. Raises Mounted if it is in another one. `unlocks`: see `FolderTree.walk`."""
    if unlocks and not _IS_LINUX:  # before it can be opened
        _refuse_others(os.stat(name, dir_fd=folder, follow_symlinks=False), name)
        os.chmod(name, 0o700, dir_fd=folder, follow_symlinks=False)
    place = os.open(name, _PLACE | os.O_DIRECTORY, dir_fd=folder)
    try:
        if mount_of(place) != mount:
            raise Mounted(name)
        if unlocks and _IS_LINUX:
            _refuse_others(os.fstat(place), name)
            os.chmod(f"/proc/self/fd/{place}", 0o700)
        return os.open(".", FOLDER, dir_fd=place)
    finally:
        os.close(place)


def _refuse_others(status: os.stat_result, path: str) -> None:
    if status.st_uid != os.geteuid():
        raise LeftAlone(errno.EPERM, f"belongs to user {status.st_uid}", path)


def _entries(folder: int) -> list[tuple[str, bool]]:
    with os.scandir(folder) as entries:
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]


def _is_folder(name: str, folder: int) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:  # the walk says why
        return False
