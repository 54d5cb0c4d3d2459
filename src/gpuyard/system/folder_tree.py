"""A folder and all in it, used by descriptors: no path below it follows a symbolic link, even one that another user
puts there meanwhile.

Paths are relative to the folder, and "." is the folder itself. Errors name the whole path.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Self

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class FolderTree:
    """Is closed at the end of a `with` block. Raises OSError if the path is not a folder, but a link to one."""

    def __init__(self, path: str | Path) -> None:
        self._path = str(path)
        self.descriptor = os.open(path, FOLDER)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def name(self, path: str) -> str:
        """Return the whole path, for messages."""
        return self._path if path == "." else f"{self._path}/{path}"

    @property
    def is_ours(self) -> bool:
        return os.fstat(self.descriptor).st_uid == os.geteuid()

    def is_at(self, path: str | Path) -> bool:
        """Return whether the folder has this path now."""
        return os.path.samestat(os.fstat(self.descriptor), os.lstat(path))

    @contextlib.contextmanager
    def at(self, path: str) -> Iterator[tuple[int, str]]:
        """Yield a descriptor of the folder that `path` is in, and its name there."""
        *folders, name = path.split("/")
        with contextlib.ExitStack() as opened:
            folder = self.descriptor
            try:
                for each in folders:
                    folder = os.open(each, FOLDER, dir_fd=folder)
                    opened.callback(os.close, folder)
                yield folder, name
            except OSError as error:
                error.filename = self.name(path)
                raise

    def paths(self) -> list[str]:
        """Return the paths of all entries, a folder before its own entries."""
        found = ["."]
        for path in found:  # grows meanwhile
            if stat.S_ISDIR(self.status(path).st_mode):
                with self.open(path, FOLDER) as folder:
                    found += [name if path == "." else f"{path}/{name}" for name in os.listdir(folder)]
        return found

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

    def remove(self, path: str) -> None:
        """Remove an entry that is not a folder, or is an empty one."""
        with self.at(path) as (folder, name):
            is_folder = stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
            (os.rmdir if is_folder else os.unlink)(name, dir_fd=folder)


def remove_own_tree(path: str | Path, folder: int | None = None) -> None:
    """Remove a folder of ours and all in it, also where it is read-only. What belongs to another user stays, and raises
    PermissionError."""
    _unlock(path, folder)
    inner = os.open(path, FOLDER, dir_fd=folder)
    try:
        for name in os.listdir(inner):
            if stat.S_ISDIR(os.stat(name, dir_fd=inner, follow_symlinks=False).st_mode):
                remove_own_tree(name, inner)
            else:
                os.unlink(name, dir_fd=inner)
    finally:
        os.close(inner)
    os.rmdir(path, dir_fd=folder)


def _unlock(path: str | Path, folder: int | None) -> None:
    """Give ourselves all permissions on a folder of ours."""
    is_linux = hasattr(os, "O_PATH")
    # O_PATH needs no permission. Elsewhere `chmod` can leave links alone, which Linux cannot.
    place = os.open(path, (os.O_PATH if is_linux else 0) | FOLDER, dir_fd=folder) if is_linux else None
    try:
        found = os.stat(path, dir_fd=folder, follow_symlinks=False) if place is None else os.fstat(place)
        if found.st_uid != os.geteuid():
            raise PermissionError(1, "it belongs to another user", str(path))
        if place is not None:
            os.chmod(f"/proc/self/fd/{place}", 0o700)
        else:
            os.chmod(path, 0o700, dir_fd=folder, follow_symlinks=False)
    finally:
        if place is not None:
            os.close(place)
