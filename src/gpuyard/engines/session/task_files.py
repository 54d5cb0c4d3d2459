"""What a task leaves in files: its output, its events, its marker and the record of its end.

Nothing here ends a task: a file that cannot be had is told of, and what a full disk does not take is left out.

Several workspaces may write logs of the same name to one folder. There the first line of a log says which workspace it
belongs to; another one never writes to it, and takes a name of its own.
"""

import contextlib
import fcntl
import os
import time

from gpuyard.system.private_files import PrivateFileError, open_in_shared, open_private


class Output:
    """A file that a task's output goes to; lines end in it as they do in files, not as on terminals."""

    def __init__(self, descriptor: int, path: str) -> None:
        self._descriptor = descriptor
        self._path = path
        self._held_back = b""
        self.problem: str | None = None

    def write(self, output: bytes) -> None:
        """A carriage return at its end waits: it may be the first half of a line's end."""
        output = self._held_back + output
        self._held_back = b"\r" if output.endswith(b"\r") else b""
        self._write(output[: len(output) - len(self._held_back)].replace(b"\r\n", b"\n"))

    def finish(self) -> None:
        self._write(self._held_back)

    def _write(self, content: bytes) -> None:
        try:
            while content:
                content = content[os.write(self._descriptor, content) :]
        except OSError as error:
            self.problem = f"some of the output is missing in {self._path}: {error.strerror}"


def owner_line(tag: str, workspace: str) -> str:
    """The first line of a log in a folder that workspaces share, whatever link led to the workspace."""
    return f"# log of the workspace {tag}: {printable(os.path.realpath(workspace))}\n"


def open_log(path: str, other: str | None, line: str) -> tuple[int, str]:
    """Open the first of both that no other task writes to; it is locked as long as this process lives.

    `other` is a name of this workspace alone, and given where workspaces share the folder: `path` is used there only if
    its first line is `line`.
    """
    for each in filter(None, (path, other)):
        log = open_private(each)
        if _is_locked(log) and (other is None or each == other or _belongs_to(line, log)):
            return log, each
        os.close(log)
    raise PrivateFileError(f"{path} is written by another task", hint="give one of the two another name")


def _is_locked(log: int) -> bool:
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def claim_in_shared(path: str, line: str) -> bool:
    """Return whether the log belongs to the workspace that `line` names. A new or empty one does from now on."""
    log = open_in_shared(path)
    try:
        fcntl.flock(log, fcntl.LOCK_EX)
        return _belongs_to(line, log)
    finally:
        os.close(log)


def _belongs_to(line: str, log: int) -> bool:
    wanted = os.fsencode(line)
    first = os.pread(log, len(wanted), 0)
    if not first:
        with contextlib.suppress(OSError):
            os.write(log, wanted)
    return first in (b"", wanted)


def tell(path: str, text: str) -> None:
    """A line for people, with the time; one write, as others append to the same file."""
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {printable(text)}\n"
    log = open_in_shared(path)
    with contextlib.suppress(OSError):
        os.write(log, os.fsencode(line))
    os.close(log)


def printable(text: str) -> str:
    """On one line, whatever the names in it contain."""
    return "".join(letter if letter.isprintable() or "\udc80" <= letter <= "\udcff" else "?" for letter in text)


def write_whole(path: str, content: str) -> None:
    """All of it or nothing, also for those who look in the same moment. OSError where it cannot be."""
    place = os.path.dirname(path)
    with contextlib.suppress(FileExistsError):
        os.mkdir(place)  # not what it is in: a workspace that was moved away is not to be made anew
    draft = f"{place}/.{os.urandom(8).hex()}.gpuyard"
    try:
        with open(draft, "x", encoding="utf-8", errors="surrogateescape") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
