"""The code of a submission: the Git commit, a digest of the script, and the snapshot of the files that its jobs run in.

A snapshot has the layout of the tree that it was made of: `inside` maps a path of the tree to the same place in it.
"""

import posixpath

from msgspec import Struct

_SHORT_COMMIT = 10


class CodeSnapshot(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Copies of the files of the tree at `root`, in `folder`. Jobs start in `cwd`, the same place of the snapshot as
    their working directory. `name` identifies it among all snapshots."""

    name: str
    folder: str
    root: str
    cwd: str

    def inside(self, path: str) -> str | None:
        """Return where a path of the tree is in the snapshot; None for a path outside the tree."""
        path = posixpath.normpath(path)
        if path == self.root:
            return self.folder
        prefix = self.root if self.root.endswith("/") else f"{self.root}/"
        return f"{self.folder}/{path.removeprefix(prefix)}" if path.startswith(prefix) else None


class CodeRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was recorded when the jobs were submitted.

    `root` is the Git work tree of the working directory and `commit` what was checked out there. `script` is the file
    that the command runs, as an absolute path, and `digest` that of its content. None: there is none, or it is unknown.
    """

    root: str | None = None
    commit: str | None = None
    script: str | None = None
    digest: str | None = None
    snapshot: CodeSnapshot | None = None


def commit_text(commit: str | None, *, is_dirty: bool | None) -> str | None:
    """Return `commit 1a2b3c4d5e, with uncommitted changes`; None without a commit."""
    if commit is None:
        return None
    return f"commit {commit[:_SHORT_COMMIT]}{', with uncommitted changes' if is_dirty else ''}"


def changed_script_text(
    script: str, *, is_changed: bool | None, attempts: tuple[int, ...], is_over: bool
) -> str | None:
    """Return what to say about a script that is no longer what it was at submission; None if nothing is to be said.

    is_changed: as it is now. attempts: those that started with a changed script.
    """
    name = posixpath.basename(script)
    ran = f"attempt{'s' if len(attempts) > 1 else ''} {', '.join(map(str, attempts))}" if attempts else ""
    if ran:
        return f"the script {name} has changed since it was submitted: {ran} ran the changed one"
    if not is_changed:
        return None
    after = "" if is_over else "; the next attempt runs it as it is then"
    return f"the script {name} has changed since it was submitted{after}"
