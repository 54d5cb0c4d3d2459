"""What is recorded of the code of a submission: the Git commit and a digest of the script.

It is fast, as every `gpuyard submit` does it: no `git` is called, a few small files are read. Files that cannot be read
are ignored: the job itself will report them. Whether the work tree had changes is found out later, by the daemon.
"""

import os

from gpuyard.system.script_digest import find_script, script_digest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_COMMIT_LENGTHS = (40, 64)
_HEX = frozenset("0123456789abcdef")
_MOST_BYTES = 4096
_MOST_PACKED = 8 << 20


def code_of(command: "Sequence[str]", cwd: str) -> "dict[str, object]":
    """Return the fields of a `CodeRecord`."""
    root = work_tree(cwd)
    script = find_script(command, cwd)
    return {
        "root": root,
        "commit": None if root is None else read_commit(root),
        "script": script,
        "digest": None if script is None else script_digest(script),
    }


def work_tree(cwd: str) -> str | None:
    """Return the Git work tree that contains a folder; None if there is none."""
    folder = os.path.abspath(cwd)
    while True:
        if os.path.lexists(f"{folder}/.git"):
            return folder
        above = os.path.dirname(folder)
        if above == folder:
            return None
        folder = above


def read_commit(root: str) -> str | None:
    """Return the commit that is checked out; None before the first commit, or if it cannot be told."""
    git = _git_folder(root)
    if git is None:
        return None
    head = _read(f"{git}/HEAD")
    if not head.startswith("ref: "):
        return _commit(head)
    name = head[len("ref: ") :].strip()
    common = _read(f"{git}/commondir").strip()  # of a linked work tree
    shared = os.path.join(git, common) if common else git
    return _commit(_read(f"{git}/{name}")) or _commit(_read(f"{shared}/{name}")) or _packed(shared, name)


def _git_folder(root: str) -> str | None:
    """Return the folder of the repository. In submodules and linked work trees, `.git` is a file that names it."""
    path = f"{root}/.git"
    if os.path.isdir(path):
        return path
    text = _read(path)
    return os.path.join(root, text[len("gitdir: ") :].strip()) if text.startswith("gitdir: ") else None


def _packed(folder: str, name: str) -> str | None:
    for line in _read(f"{folder}/packed-refs", _MOST_PACKED).splitlines():
        commit, _, packed = line.partition(" ")
        if packed == name:
            return _commit(commit)
    return None


def _commit(text: str) -> str | None:
    text = text.strip()
    return text if len(text) in _COMMIT_LENGTHS and _HEX.issuperset(text) else None


def _read(path: str, most: int = _MOST_BYTES) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(most).decode(errors="surrogateescape")
    except (OSError, ValueError):
        return ""
