"""Lists the files of a Git work tree, and tells whether it has changes; with its submodules and work trees in it."""

import os

from gpuyard.connect.git_folder import git_folder
from gpuyard.connect.run_git import open_git

_COPIED = ("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate")
_IGNORED = ("ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory")
# It looks at the commit of a submodule only: else it would start itself there, with the submodule's settings.
_CHANGED = ("status", "--porcelain", "-z", "--ignore-submodules=dirty")
_INDEX = ("ls-files", "-z", "--stage")
_SUBMODULE = "160000 "


def list_tree(root: str) -> tuple[list[str], list[str]]:
    """Return what is tracked or new, and what is ignored, relative to the root. A folder ends with `/` if it is ignored
    as a whole. A file that Git tracks may be missing.

    Raises EnvironmentFault if git is missing, or fails.
    """
    files: list[str] = []
    linked: list[str] = []
    pending = [""]
    while pending:
        at = pending.pop()
        with open_git(f"{root}/{at}".rstrip("/")) as git:
            copied, ignored = git.lists(_COPIED, _IGNORED)
        linked += [f"{at}{name}" for name in ignored]
        for name in dict.fromkeys(copied):
            # A submodule, or an untracked work tree, which git lists as a folder. A link to a work tree is none: it may
            # lead back here.
            inner = f"{at}{name}".rstrip("/")
            if git_folder(f"{root}/{inner}") is None or os.path.islink(f"{root}/{inner}"):
                files.append(f"{at}{name}")
            else:
                pending.append(f"{inner}/")
    return files, linked


def has_changes(root: str) -> bool:
    """Return whether a work tree has changes that are not committed. Raises EnvironmentFault if git is missing, or
    fails."""
    pending = [root]
    while pending:
        at = pending.pop()
        with open_git(at) as git:
            changed, index = git.lists(_CHANGED, _INDEX)
        if changed:
            return True
        submodules = [line.partition("\t")[2] for line in index if line.startswith(_SUBMODULE)]
        pending += [f"{at}/{name}" for name in submodules if git_folder(f"{at}/{name}") is not None]
    return False
