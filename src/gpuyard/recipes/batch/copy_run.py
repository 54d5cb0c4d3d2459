"""Copy a run to another file system, and compare the copy. Follows no symbolic link, at any moment (`FolderTree`).

`paths` are those of the run, as `FolderTree.paths` returns them.
"""

import contextlib
import errno
import os
import shutil
import stat
from pathlib import Path

from gpuyard.system.folder_tree import FolderTree

CHUNK = 64 * 1024
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


def copy_all(run: FolderTree, copy: FolderTree, paths: list[str]) -> None:
    for path in paths[1:]:
        _copy_one(run, copy, path)
    for path in paths:  # after all copies: a folder's times change when an entry is added
        _copy_status(run, copy, path)


def _copy_one(run: FolderTree, copy: FolderTree, path: str) -> None:
    mode = run.status(path).st_mode
    if stat.S_ISREG(mode):
        with (
            run.open(path) as here,
            copy.open(path, _NEW) as there,
            open(here, "rb", closefd=False) as source,
            open(there, "wb", closefd=False) as target,
        ):
            shutil.copyfileobj(source, target)
        return
    if not (stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
        raise OSError(errno.EINVAL, "neither a file nor a folder, and cannot be copied", run.name(path))
    with copy.at(path) as (folder, name):
        if stat.S_ISDIR(mode):
            os.mkdir(name, 0o700, dir_fd=folder)
        else:
            os.symlink(run.link(path), name, dir_fd=folder)


def _copy_status(run: FolderTree, copy: FolderTree, path: str) -> None:
    """Copy times and permissions, and sync the copy to disk."""
    status = run.status(path)
    if stat.S_ISLNK(status.st_mode):
        with copy.at(path) as (folder, name):
            os.utime(name, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=folder, follow_symlinks=False)
        return
    with run.open(path) as here, copy.open(path) as there:
        with contextlib.suppress(PermissionError):  # not every file system stores modes
            shutil.copystat(here, there)  # type: ignore[arg-type]  # all that it calls takes descriptors
        os.fsync(there)


def has_copy(run: FolderTree, paths: list[str], target: Path) -> bool:
    try:
        with FolderTree(target) as copy:
            return copy.is_ours and is_whole(run, copy, paths)
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_whole(run: FolderTree, copy: FolderTree, paths: list[str]) -> bool:
    return all(_is_same(run, copy, path) for path in paths)


def _is_same(run: FolderTree, copy: FolderTree, path: str) -> bool:
    try:
        one, other = run.status(path), copy.status(path)
        if stat.S_IFMT(one.st_mode) != stat.S_IFMT(other.st_mode):
            return False
        if stat.S_ISDIR(one.st_mode):
            return not os.path.samestat(one, other)  # a folder mounted twice would be removed at both places
        if stat.S_ISLNK(one.st_mode):
            return run.link(path) == copy.link(path)
        with run.open(path) as here, copy.open(path) as there:
            return stat.S_ISREG(one.st_mode) and one.st_size == other.st_size and _has_same_content(here, there)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _has_same_content(one: int, other: int) -> bool:
    while content := os.read(one, CHUNK):
        if os.read(other, len(content)) != content:
            return False
    return not os.read(other, 1)
