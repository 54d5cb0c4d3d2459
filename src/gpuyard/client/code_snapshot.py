"""Makes a snapshot of the code of a submission: copies of the files of a Git work tree with its submodules, or of a
folder without Git, in a folder of the queue.

- Files that Git tracks or does not ignore are copied, by reflink where the disk can. Never by hard link: an editor that
writes in place would change the snapshot. `__pycache__` is left out: two versions of the code would share it.
- What Git ignores (data, results, virtual environments) is linked to, so that a job writes to the tree itself.
- Symbolic links stay links. One that leads out of the tree is made absolute, and never followed.
"""

import contextlib
import fcntl
import os
import stat

from gpuyard.client import git_tree as git_files
from gpuyard.client.submitted_code import work_tree
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.model.units import MB, format_size
from gpuyard.system.code_snapshot_listing import FILES, NEW, TREE, Listed, write_listing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_LEFT_OUT = ("__pycache__", ".git")
_MOST_FILES = 50_000


class SnapshotLimits:
    """`most_mb`: all files together. `keep_free_mb`: what stays free on the disk."""

    def __init__(self, most_mb: float, keep_free_mb: float) -> None:
        self.most_mb, self.keep_free_mb = most_mb, keep_free_mb


def take_snapshot(cwd: str, folder: str, limits: SnapshotLimits) -> "dict[str, str]":
    """Make a snapshot of the tree that holds `cwd` in `folder`; return the fields of a `CodeSnapshot`. Raises UserError
    if the tree is too large, and EnvironmentFault if it cannot be read or copied."""
    cwd = os.path.realpath(cwd)
    found = work_tree(cwd)
    root = cwd if found is None else found
    name = os.urandom(8).hex()
    draft = f"{folder}/{NEW}{name}"
    umask = os.umask(0)  # the folder is this user's alone, and files keep their modes
    try:
        files, linked = _list(root, folder, limits, is_git=found is not None)
        _check_size(files, root, folder, limits)
        os.mkdir(draft, 0o700)
        os.mkdir(tree := f"{draft}/{TREE}", 0o700)
        folders = {""}
        listed = list(_copy_all(root, tree, files, folders))
        for each in linked:  # what Git ignores; a folder that holds nothing else is linked to as a whole
            _make_above(root, tree, each, folders)
            os.symlink(f"{root}/{each}", f"{tree}/{each}")
        _make_cwd(root, tree, cwd)
        write_listing(f"{draft}/{FILES}", root, listed)
        os.rename(draft, f"{folder}/{name}")
    except BaseException as error:
        remove_snapshot(draft)
        if not isinstance(error, OSError):
            raise
        raise EnvironmentFault(
            f"no snapshot can be made: {error.filename or root}: {error.strerror}",
            hint="see that it can be read, and that the disk of the queue is not full; or submit with --no-snapshot",
        ) from error
    finally:
        os.umask(umask)
    tree = f"{folder}/{name}/{TREE}"
    return {"name": name, "folder": tree, "root": root, "cwd": os.path.normpath(f"{tree}/{os.path.relpath(cwd, root)}")}


def remove_snapshot(path: str) -> None:
    """Remove a snapshot that was not submitted. What cannot be removed is left to the daemon."""
    from gpuyard.system.folder_tree import remove_tree

    with contextlib.suppress(OSError):
        remove_tree(path)


def _list(root: str, folder: str, limits: SnapshotLimits, *, is_git: bool) -> "tuple[list[Listed], list[str]]":
    """Return the files to copy, with their status, and the paths to link to; all relative to the root."""
    inner = os.path.relpath(folder, root) if os.path.commonpath([root, folder]) == root else None
    if not is_git:
        return _walk(root, inner, limits), []
    names, ignored = git_files.list_tree(root)
    linked = dict.fromkeys(each.rstrip("/") for each in ignored)
    files = [each for name in names if not _is_within(name, inner) for each in _find(root, name, inner, limits)]
    kept = [each for each in linked if each.rpartition("/")[2] not in _LEFT_OUT and not each.endswith(".pyc")]
    return files, [each for each in kept if not _is_within(each, inner)]


def _is_within(path: str, folder: str | None) -> bool:
    """Whether a path is below the folder of all snapshots, which may be in the tree."""
    return folder is not None and (path == folder or path.startswith(f"{folder}/"))


def _find(root: str, name: str, inner: str | None, limits: SnapshotLimits) -> "list[Listed]":
    """Return a file with its status; of a folder all files: it is a work tree whose repository does not count."""
    try:
        found = os.lstat(f"{root}/{name}")
    except (FileNotFoundError, NotADirectoryError):  # deleted in the work tree
        return []
    if stat.S_ISDIR(found.st_mode):
        return _walk(root, inner, limits, f"{name.rstrip('/')}/")
    return [(name, found)] if stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode) else []


def _walk(root: str, inner: str | None, limits: SnapshotLimits, at: str = "") -> "list[Listed]":
    """Return all files of a folder without Git, `at` in the root. Stops early if they are too many."""
    files: list[Listed] = []
    size, pending = 0, [at]
    while pending:
        at = pending.pop()
        with os.scandir(f"{root}/{at}") as entries:
            for entry in entries:
                if entry.name in _LEFT_OUT or _is_within(at + entry.name, inner):
                    continue
                found = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(found.st_mode):
                    pending.append(f"{at}{entry.name}/")
                elif stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode):
                    files.append((at + entry.name, found))
                    size += found.st_size
        if size > limits.most_mb * MB or len(files) > _MOST_FILES:
            _refuse(files, root, limits, "more than ")
    return files


def _check_size(files: "list[Listed]", root: str, folder: str, limits: SnapshotLimits) -> None:
    size = sum(found.st_size for _, found in files)
    if size > limits.most_mb * MB or len(files) > _MOST_FILES:
        _refuse(files, root, limits)
    disk = os.statvfs(folder)
    free_mb = disk.f_bavail * disk.f_frsize / MB
    if free_mb - size / MB < limits.keep_free_mb:
        raise EnvironmentFault(
            f"no snapshot can be made: it takes {format_size(size / MB)}, and {format_size(free_mb)} is free on the "
            f"disk of {folder}, of which {format_size(limits.keep_free_mb)} stays free",
            hint="free some space (`gpuyard clean`), or submit with --no-snapshot",
        )


def _refuse(files: "list[Listed]", root: str, limits: SnapshotLimits, about: str = "") -> None:
    largest = sorted(files, key=lambda each: -each[1].st_size)[:3]
    named = ", ".join(f"{name} ({format_size(found.st_size / MB)})" for name, found in largest)
    size = format_size(sum(found.st_size for _, found in files) / MB)
    raise UserError(
        f"{root} is too large for a snapshot: {about}{len(files)} files with {size}, and the limit is {_MOST_FILES} "
        f"files with {format_size(limits.most_mb)}; the largest: {named}",
        hint="put data and results into .gitignore of a Git work tree (jobs still find them), raise `snapshot_size` "
        "under [submit], or submit with --no-snapshot",
    )


def _make_above(root: str, tree: str, name: str, known: "set[str]") -> None:
    """Make the folders above the name that are not `known`, with the modes that they have in the tree."""
    above, missing = name.rpartition("/")[0], []
    while above not in known:
        missing.append(above)
        above = above.rpartition("/")[0]
    for each in reversed(missing):
        os.mkdir(f"{tree}/{each}", stat.S_IMODE(os.lstat(f"{root}/{each}").st_mode) | 0o700)
    known.update(missing)


def _copy_all(root: str, tree: str, files: "list[Listed]", folders: "set[str]") -> "Iterator[Listed]":
    can_clone = True
    for name, found in files:
        _make_above(root, tree, name, folders)
        status: os.stat_result | None = found
        if stat.S_ISLNK(found.st_mode):
            target, above = os.readlink(f"{root}/{name}"), os.path.dirname(f"{root}/{name}")
            meant = os.path.normpath(os.path.join(above, target))
            if meant != root and not meant.startswith(f"{root}/"):
                target = meant
            elif os.path.isabs(target):  # the same place of the snapshot
                target = os.path.relpath(meant, above)
            os.symlink(target, f"{tree}/{name}")
        else:
            status, can_clone = _copy(f"{root}/{name}", f"{tree}/{name}", can_clone=can_clone)
        if status is not None:
            yield name, status


def _copy(source: str, target: str, *, can_clone: bool) -> "tuple[os.stat_result | None, bool]":
    """Copy a regular file. Return its status, None if it has gone, and whether the disk can share blocks."""
    try:
        reading = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None, can_clone
    try:
        found = os.fstat(reading)
        if not stat.S_ISREG(found.st_mode):
            return None, can_clone
        mode = stat.S_IMODE(found.st_mode) & 0o777 | 0o600  # the umask is 0
        writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            can_clone = can_clone and _clone(reading, writing)
            while not can_clone and (content := os.read(reading, 1 << 20)):
                left = memoryview(content)
                while left:
                    left = left[os.write(writing, left) :]
                if len(content) < 1 << 20 and len(content) == found.st_size:
                    break
            os.utime(writing, ns=(found.st_atime_ns, found.st_mtime_ns))
        finally:
            os.close(writing)
    finally:
        os.close(reading)
    return found, can_clone


def _clone(reading: int, writing: int) -> bool:
    try:
        fcntl.ioctl(writing, 0x40049409, reading)  # FICLONE from linux/fs.h: share the blocks of another file
    except OSError:  # another file system, or one that cannot share blocks
        return False
    return True


def _make_cwd(root: str, tree: str, cwd: str) -> None:
    """Make sure that the working directory is in the snapshot, also where it is empty."""
    at = tree
    for part in os.path.relpath(cwd, root).split("/"):
        at = f"{at}/{part}"
        if os.path.islink(at):
            raise UserError(
                f"Git ignores {cwd}, and a snapshot has nothing of what Git ignores",
                hint="submit from a folder that Git does not ignore, or with --no-snapshot",
            )
        if not os.path.isdir(at):
            os.mkdir(at, 0o700)
