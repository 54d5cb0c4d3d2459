"""The script that a command runs, and a digest of its content. It imports little, as `gpuyard submit` uses it."""

import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# Files that people edit and interpreters run.
_ENDINGS = (".py", ".sh", ".bash", ".zsh", ".fish", ".r", ".jl", ".lua", ".pl", ".rb", ".js", ".ts", ".ipynb", ".m")
# A longer script is known by its beginning.
_MOST_BYTES = 1 << 20


def find_script(command: "Sequence[str]", cwd: str) -> str | None:
    """Return the script as an absolute path: the first argument that is a file with the ending of a script, the module
    of `-m`, or a program given by its path that begins with `#!`. None if there is none."""
    for word in command:
        if word.lower().endswith(_ENDINGS) and (path := _file(cwd, word)) is not None:
            return path
    if "-m" in command[:-1]:
        module = command[list(command).index("-m") + 1].replace(".", "/")
        return _file(cwd, f"{module}.py") or _file(cwd, f"{module}/__main__.py")
    program = _file(cwd, command[0]) if command and "/" in command[0] else None
    return program if program is not None and read_start(program, 2) == b"#!" else None


def script_digest(path: str) -> str | None:
    """Return a digest of the content; None if the script cannot be read."""
    content = read_start(path, _MOST_BYTES)
    if content is None:
        return None
    from _blake2 import blake2b  # as in `hashlib`, without the milliseconds that OpenSSL takes to load

    return str(blake2b(content, digest_size=16).hexdigest())


def read_start(path: str, most: int) -> bytes | None:
    """Return the first bytes of a regular file; None if it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except (OSError, ValueError):
        return None
    try:
        return os.read(descriptor, most) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _file(cwd: str, name: str) -> str | None:
    path = os.path.normpath(os.path.join(cwd, name))
    try:
        return path if stat.S_ISREG(os.stat(path).st_mode) else None
    except (OSError, ValueError):
        return None
