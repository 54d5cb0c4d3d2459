"""Lists the files of a Git work tree, and tells whether it has changes. The only place that starts `git`.

The settings of a repository name programs (filters, hooks, monitors, pagers). Who can write to it would run them in our
name, so git never reads these settings:
- It works in a repository of ours, which borrows their objects and index, and has their settings of `_PASSED`. Our
attributes turn all filters off. Each submodule gets a repository of ours, too.
- It is killed after 30 s: a pipe with the name of a file that it reads would keep it for ever."""

import os
from contextlib import contextmanager

from gpuyard.client.submitted_code import git_folder, read_commit, read_text, shared_folder
from gpuyard.errors import EnvironmentFault
from gpuyard.model.printable_text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_BOOLEANS = ("true", "false")
_PASSED = {
    **dict.fromkeys((f"core.{name}" for name in ("filemode", "symlinks", "ignorecase", "trustctime")), _BOOLEANS),
    "core.precomposeunicode": _BOOLEANS,
    "core.checkstat": ("default", "minimal"),
    "core.autocrlf": (*_BOOLEANS, "input"),
    "core.eol": ("lf", "crlf", "native"),
    "extensions.objectformat": ("sha1", "sha256"),
}
# Settings of this user that start programs, or would write to the index.
_OFF = ("--no-optional-locks", "--no-pager", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
_HINT = "submit with --no-snapshot"
_WITHIN_S = 30.0


@contextmanager
def open_git(root: str) -> "Iterator[Git]":
    """Make `git` usable in one work tree. Raises EnvironmentFault if there is no git."""
    theirs, program = git_folder(root), _find_git()
    if theirs is None:
        raise EnvironmentFault(f"{printable(root)} has no Git repository of yours", hint=_HINT)
    own = f"{os.environ.get('TMPDIR') or '/tmp'}/gpuyard-git-{os.urandom(8).hex()}"  # noqa: S108 - mkdir takes no other
    shared = shared_folder(theirs)
    os.mkdir(own, 0o700)
    try:
        _fill(own, theirs, shared, read_commit(root))
        others = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        borrowed = {"GIT_INDEX_FILE": f"{theirs}/index", "GIT_OBJECT_DIRECTORY": f"{shared}/objects"}
        yield Git(program, root, {**others, **borrowed, "GIT_DIR": own, "GIT_WORK_TREE": root})
    finally:
        for folder in (f"{own}/refs", f"{own}/info", own):
            if os.path.isdir(folder):
                for name in os.listdir(folder):
                    os.unlink(f"{folder}/{name}")
                os.rmdir(folder)


def _fill(own: str, theirs: str, shared: str, commit: str | None) -> None:
    for name in ("refs", "info"):
        os.mkdir(f"{own}/{name}", 0o700)
    os.symlink(f"{shared}/info/exclude", f"{own}/info/exclude")
    with os.scandir(theirs) as entries:
        for name in (each.name for each in entries if each.name.startswith("sharedindex.")):  # of a split index
            os.symlink(f"{theirs}/{name}", f"{own}/{name}")
    settings, section = "[core]\nrepositoryformatversion = 1\nbare = false\n", ""
    for line in read_text(f"{shared}/config", 1 << 20).lower().splitlines():
        key, _, value = (part.strip() for part in line.partition("="))
        if key.startswith("["):
            section = key.strip("[] ")
        elif value in _PASSED.get(f"{section}.{key}", ()):
            settings += f"[{section}]\n{key} = {value}\n"
    texts = {"HEAD": f"{commit or 'ref: refs/heads/none'}\n", "config": settings, "info/attributes": "* -filter\n"}
    for name, text in texts.items():
        with open(f"{own}/{name}", "x", encoding="ascii") as file:
            file.write(text)


class Git:
    """`git` in one work tree."""

    def __init__(self, program: str, root: str, environment: "dict[str, str]") -> None:
        self._program, self._root, self._environment = program, root, environment

    def lists(self, *commands: "tuple[str, ...]") -> "list[list[str]]":
        """Return what commands print that run side by side, each item ended by a zero byte. Raises EnvironmentFault if
        one fails, or does not end within 30 s."""
        import subprocess  # takes 10 ms

        found, started = [], list[subprocess.Popen[bytes]]()
        try:
            for command in commands:
                arguments = ("git", "-C", self._root, *_OFF, *command)
                process = subprocess.Popen(
                    arguments, executable=self._program, env=self._environment, stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                )  # fmt: skip
                started.append(process)
            for command, process in zip(commands, started, strict=True):
                output, _ = process.communicate(timeout=_WITHIN_S)
                if code := process.returncode:
                    place = printable(self._root)
                    raise EnvironmentFault(f"`git {command[0]}` failed in {place} (status {code})", hint=_HINT)
                found.append([name for name in os.fsdecode(output).split("\0") if name])
        except subprocess.TimeoutExpired as error:
            hint = f"is a file of the tree a pipe? Or {_HINT}"
            raise EnvironmentFault(f"git did not end within {_WITHIN_S:g} s", hint=hint) from error
        finally:
            for process in started:
                process.kill()
                process.communicate()
        return found


def _find_git() -> str:
    """A relative folder on PATH would be one of the repository."""
    for folder in os.environ.get("PATH", os.defpath).split(":"):
        path = f"{folder}/git"
        if folder.startswith("/") and os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    raise EnvironmentFault(
        "there is no git on PATH, and a snapshot of a Git work tree needs it",
        hint="install git, or submit with --no-snapshot",
    )


def list_tree(root: str) -> tuple[list[str], list[str]]:
    """Return what is tracked (it may be missing) or new, and what is ignored; a folder ends with `/`."""
    to_copy = ("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate")
    to_link = ("ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory")
    files, linked, pending = list[str](), list[str](), [""]
    while pending:
        at = pending.pop()
        with open_git(f"{root}/{at}".rstrip("/")) as git:
            copied, ignored = git.lists(to_copy, to_link)
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
    """Return whether a work tree has changes that are not committed. Raises EnvironmentFault if git fails."""
    # It looks at the commit of a submodule only: else it would start itself there, with the submodule's settings.
    commands = ("status", "--porcelain", "-z", "--ignore-submodules=dirty"), ("ls-files", "-z", "--stage")
    pending = [root]
    while pending:
        at = pending.pop()
        with open_git(at) as git:
            changed, index = git.lists(*commands)
        if changed:
            return True
        submodules = [line.partition("\t")[2] for line in index if line.startswith("160000 ")]
        pending += [f"{at}/{name}" for name in submodules if git_folder(f"{at}/{name}") is not None]
    return False
