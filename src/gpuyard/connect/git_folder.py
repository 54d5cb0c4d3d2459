"""Finds the Git repository of a folder, and reads which commit is checked out. No `git` is started.

Other users may have put a `.git` into any folder above. So
- a repository counts only if its `.git`, and what that leads to, belong to this user, root or a group of this user; in
  a folder where all users can write, as /tmp, a group is not enough. Any other is passed over, as if it was not there.
- files are opened without waiting and without following links, must be regular, belong to the same, and are read up to
  a limit.

It imports nothing else, as every `gpuyard submit` uses it.
"""

import os
import stat

_COMMIT_LENGTHS = (40, 64)
_HEX = frozenset("0123456789abcdef")
_MOST_BYTES = 4096
_MOST_PACKED = 8 << 20
_SAFELY = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def work_tree(cwd: str) -> str | None:
    """Return the Git work tree that contains a folder; None if there is none."""
    folder = os.path.abspath(cwd)
    while True:
        if git_folder(folder) is not None:
            return folder
        above = os.path.dirname(folder)
        if above == folder:
            return None
        folder = above


def git_folder(root: str) -> str | None:
    """Return the folder of the repository of a work tree; None if there is none that counts.

    In submodules and linked work trees, `.git` is a file that names it.
    """
    path = f"{root}/.git"
    try:
        found = os.lstat(path)
        if not _is_ours(found, above=root):
            return None
        if stat.S_ISREG(found.st_mode):
            text = read_text(path)
            path = os.path.join(root, text.removeprefix("gitdir: ").strip()) if text.startswith("gitdir: ") else ""
        if not stat.S_ISDIR(found.st_mode):
            found = os.stat(path)
    except (OSError, ValueError):
        return None
    return path if stat.S_ISDIR(found.st_mode) and _is_ours(found) else None


def shared_folder(git: str) -> str:
    """Return the folder with branches and objects, which linked work trees share."""
    return os.path.join(git, read_text(f"{git}/commondir").strip())


def read_commit(root: str) -> str | None:
    """Return the commit that is checked out; None before the first commit, or if it cannot be told."""
    git = git_folder(root)
    if git is None:
        return None
    head = read_text(f"{git}/HEAD")
    if not head.startswith("ref: "):
        return _commit(head)
    name, shared = head[len("ref: ") :].strip(), shared_folder(git)
    return _commit(read_text(f"{git}/{name}")) or _commit(read_text(f"{shared}/{name}")) or _packed(shared, name)


def _packed(folder: str, name: str) -> str | None:
    for line in read_text(f"{folder}/packed-refs", _MOST_PACKED).splitlines():
        commit, _, packed = line.partition(" ")
        if packed == name:
            return _commit(commit)
    return None


def _commit(text: str) -> str | None:
    text = text.strip()
    return text if len(text) in _COMMIT_LENGTHS and _HEX.issuperset(text) else None


def read_text(path: str, most: int = _MOST_BYTES) -> str:
    """Return the beginning of a file of a repository; empty if it cannot be read, or does not count."""
    try:
        file = os.open(path, _SAFELY)
    except (OSError, ValueError):
        return ""
    try:
        found = os.fstat(file)
        is_readable = stat.S_ISREG(found.st_mode) and _is_ours(found)
        return os.read(file, most).decode(errors="surrogateescape") if is_readable else ""
    except OSError:
        return ""
    finally:
        os.close(file)


def _is_ours(found: os.stat_result, above: str | None = None) -> bool:
    """Return whether this belongs to this user, root or a group of this user; a group is not enough if all users can
    write to the folder above."""
    if found.st_uid in (os.geteuid(), 0):
        return True
    is_groups = found.st_gid == os.getegid() or found.st_gid in os.getgroups()
    return is_groups and (above is None or not os.stat(above).st_mode & stat.S_IWOTH)
