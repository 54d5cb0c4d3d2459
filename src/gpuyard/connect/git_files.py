"""Lists the files of a Git work tree, with those of its submodules and of other work trees in it.

`git` is started without the module `subprocess`, whose import takes longer than its run.
"""

import os

from gpuyard.errors import EnvironmentFault

_COPIED = ("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate")
_IGNORED = ("ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory")


def list_tree(root: str) -> tuple[list[str], list[str]]:
    """Return what is tracked or new, and what is ignored, relative to the root. A folder ends with `/` if it is ignored
    as a whole. A file that Git tracks may be missing.

    Raises EnvironmentFault if git is missing, or fails.
    """
    program = _find_git()
    copied, ignored = _start(program, root, _COPIED), _start(program, root, _IGNORED)
    names, linked = _read(root, *copied), _read(root, *ignored)
    files: list[str] = []
    for name in dict.fromkeys(names):
        # A submodule, or an untracked work tree, which git lists as a folder.
        inner = name.rstrip("/")
        if os.path.lexists(f"{root}/{inner}/.git"):
            within, ignored_within = list_tree(f"{root}/{inner}")
            files += [f"{inner}/{each}" for each in within]
            linked += [f"{inner}/{each}" for each in ignored_within]
        else:
            files.append(name)
    return files, linked


def _find_git() -> str:
    for folder in os.environ.get("PATH", os.defpath).split(":"):
        path = f"{folder or '.'}/git"
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    raise EnvironmentFault(
        "there is no git on PATH, and a snapshot of a Git work tree needs it",
        hint="install git, or submit with --no-snapshot",
    )


def _start(program: str, root: str, arguments: tuple[str, ...]) -> tuple[int, int]:
    """Return the pid, and a descriptor of its output."""
    reading, writing = os.pipe()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ("git", "-C", root, "--no-optional-locks", "-c", "core.fsmonitor=false", *arguments)
    try:
        pid = os.posix_spawn(program, command, environment, file_actions=[(os.POSIX_SPAWN_DUP2, writing, 1)])
    except OSError:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return pid, reading


def _read(root: str, pid: int, output: int) -> list[str]:
    content = bytearray()
    try:
        while chunk := os.read(output, 1 << 16):
            content += chunk
    finally:
        os.close(output)
        _, status = os.waitpid(pid, 0)
    if status:
        raise EnvironmentFault(
            f"git cannot list the files of {root}", hint="see what it says above; or submit with --no-snapshot"
        )
    return [name for name in os.fsdecode(bytes(content)).split("\0") if name]
