"""Measure and remove files of this user only.

Rules:
- A symbolic link is removed as a link and never followed, at any depth.
- A file or folder of another user stays, and so do the folders that contain it.
- A file system mounted inside a folder stays.
"""

import os
import stat
from collections.abc import Iterable, Iterator

from msgspec import Struct

from gpuyard.recipes.uninstall.find_files import InstalledFiles

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Each level keeps a folder open.
_DEEPEST = 200


class Size(Struct, frozen=True):
    """Number and size of the files that belong to this user."""

    files: int
    bytes: int


class RemovalProblem(Struct, frozen=True):
    """A path that was not removed, and the reason."""

    path: str
    why: str


def measure(place: InstalledFiles) -> Size:
    """Return the size of the files. Folders that cannot be read count as empty."""
    sizes = [size for name in place.names for size in _sizes(os.path.join(place.folder, name))]
    return Size(len(sizes), sum(sizes))


def remove(places: Iterable[InstalledFiles]) -> list[RemovalProblem]:
    """Remove the files, then gpuyard's own folders that are empty. Return what could not be removed."""
    places = tuple(places)
    problems = [problem for place in places for problem in _remove_names(place)]
    own = {place.folder for place in places if place.is_own_folder}
    for folder in sorted(own, key=len, reverse=True):
        problems += _remove_if_empty(folder)
    return problems


def _sizes(path: str) -> Iterator[int]:
    try:
        found = os.lstat(path)
        if found.st_uid != os.geteuid():
            return
        if not stat.S_ISDIR(found.st_mode):
            yield found.st_size
            return
        names = os.listdir(path)
    except OSError:
        return
    for name in names:
        yield from _sizes(os.path.join(path, name))


def _remove_names(place: InstalledFiles) -> Iterator[RemovalProblem]:
    try:
        # A folder that is not gpuyard's own may be a symbolic link: on macOS, /tmp is.
        folder = os.open(place.folder, _FOLDER | (os.O_NOFOLLOW if place.is_own_folder else 0))
    except FileNotFoundError:
        return
    except OSError as error:
        yield RemovalProblem(place.folder, f"cannot be opened: {error.strerror}")
        return
    try:
        device = os.fstat(folder).st_dev
        for name in place.names:
            yield from _remove_at(folder, name, os.path.join(place.folder, name), device)
    finally:
        os.close(folder)


def _remove_at(folder: int, name: str, path: str, device: int, depth: int = 0) -> Iterator[RemovalProblem]:
    """Remove an entry relative to the open folder. `path` is only for messages."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if found.st_uid != os.geteuid():
            yield RemovalProblem(path, f"belongs to user {found.st_uid}")
        elif found.st_dev != device:
            yield RemovalProblem(path, "is on another file system, mounted there")
        elif not stat.S_ISDIR(found.st_mode):
            os.unlink(name, dir_fd=folder)
        elif depth == _DEEPEST:
            yield RemovalProblem(path, f"is more than {_DEEPEST} folders deep")
        else:
            yield from _remove_tree(folder, name, path, device, depth)
    except FileNotFoundError:
        return  # already removed
    except OSError as error:
        yield RemovalProblem(path, f"cannot be removed: {error.strerror}")


def _remove_tree(folder: int, name: str, path: str, device: int, depth: int) -> Iterator[RemovalProblem]:
    inner = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    try:
        problems = [
            problem
            for each in os.listdir(inner)
            for problem in _remove_at(inner, each, os.path.join(path, each), device, depth + 1)
        ]
    finally:
        os.close(inner)
    yield from problems
    if not problems:
        os.rmdir(name, dir_fd=folder)


def _remove_if_empty(folder: str) -> Iterator[RemovalProblem]:
    try:
        if not os.listdir(folder):
            os.rmdir(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        yield RemovalProblem(folder, f"cannot be removed: {error.strerror}")
