"""The files of a task (its log, the scheduler log, its marker, its record), its result, and its runner's command.

A file that cannot be opened or written is reported, and never ends the task; a full disk loses output only. Several
workspaces may write logs of the same name to one folder. The first line of such a log names the workspace that owns
it. Other workspaces never write to it and use another name."""

import contextlib
import json
import os
import signal
import time
from typing import NamedTuple

from msgspec import to_builtins

from gpuyard.engines.common.log_cap import cut_if_over
from gpuyard.model.job_spec import session_on
from gpuyard.ports import Launch
from gpuyard.system.file_locks import lock_in_time, try_lock
from gpuyard.system.private_files import PrivateFileError, open_in_shared
from gpuyard.system.processes import python_command
from gpuyard.system.write_files import write_atomically


class Output:
    """A file for a task's terminal output; CR LF becomes LF. With a cap, the middle of a longer file is cut out."""

    def __init__(self, descriptor: int, path: str, cap: int | None = None) -> None:
        self._descriptor, self._path, self._cap = descriptor, path, cap
        self._left = 0  # until the next look at the file's length
        self._held_back = b""
        self.problem: str | None = None

    def write(self, output: bytes) -> None:
        output = self._held_back + output
        self._held_back = b"\r" if output.endswith(b"\r") else b""
        self._write(output[: len(output) - len(self._held_back)].replace(b"\r\n", b"\n"))

    def finish(self) -> None:
        self._write(self._held_back)

    def _write(self, content: bytes) -> None:
        try:
            while content:
                written = os.write(self._descriptor, content)
                content = content[written:]
                self._left -= written
                if self._cap is not None and self._left < 0:
                    self._left = self._cap
                    with contextlib.suppress(OSError):  # removed by a user, for example
                        self._left = cut_if_over(self._path, self._cap)
        except OSError as error:
            self.problem = f"some of the output is missing in {self._path}: {error.strerror}"


def owner_line(tag: str, workspace: str) -> str:
    """Return the first line of a log in a folder that workspaces share. It names the resolved path of the workspace."""
    return f"# log of the workspace {tag}: {printable(os.path.realpath(workspace))}\n"


def open_log(path: str, other: str | None, line: str) -> tuple[int, str]:
    """Open the first of `path` and `other` that no other task writes to. Keeps it locked until the process ends.
    `other` is a name that only this workspace uses. It is given where workspaces share the folder; then `path` is used
    only if its first line is `line`."""
    for each in filter(None, (path, other)):
        log = open_in_shared(each, is_own=True)
        is_locked = False
        with contextlib.suppress(OSError):  # a file system without locks
            is_locked = try_lock(log)
        if is_locked and (other is None or each == other or _belongs_to(line, log)):
            return log, each
        os.close(log)
    raise PrivateFileError(f"{path} is written by another task", hint="give one of the two another name")


def expected_log(path: str, other: str | None, line: str) -> str:
    """Return the path that `open_log` will choose, as far as that is known before."""
    try:
        with open(path, "rb") as log:
            first = log.readline()
    except OSError:  # the first task creates it
        first = b""
    return path if other is None or first in (b"", os.fsencode(line)) else other


def claim_in_shared(path: str, line: str) -> bool:
    log = open_in_shared(path)
    try:
        lock_in_time(log, path)
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


def append_event(path: str, text: str) -> None:
    """Append a line with the time, in one write, because other processes append to the same file."""
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {printable(text)}\n"
    log = open_in_shared(path)
    with contextlib.suppress(OSError):
        os.write(log, os.fsencode(line))
    os.close(log)


def printable(text: str) -> str:
    """Replace control characters by `?`, so that the text stays on one line. Undecodable bytes stay."""
    return "".join(letter if letter.isprintable() or "\udc80" <= letter <= "\udcff" else "?" for letter in text)


def write_whole(path: str, content: str) -> None:
    """Replace the file atomically, and make its folder. Raises OSError."""
    place = os.path.dirname(path)
    with contextlib.suppress(FileExistsError):
        os.mkdir(place)  # without parents: a workspace that was moved away must not be created again
    write_atomically(path, content.encode("utf-8", "surrogateescape"))


COMPLETED, FAILED, STOPPED = "completed", "failed", "stopped"
TERMINATED, HUNG_UP = 128 + signal.SIGTERM, 128 + signal.SIGHUP


class Conclusion(NamedTuple):
    result: str
    status: int
    note: str | None = None
    writes_marker: bool = False


def conclude(status: int, *, has_marker: bool, overstayed: bool, was_stopped: bool, was_closed: bool) -> Conclusion:
    """Return the result of a program that exited with `status`; it `overstayed` if the runner ended it after its
    marker, `was_stopped` if it got SIGTERM, and `was_closed` if a person closed its session."""
    if has_marker and overstayed:
        return Conclusion(COMPLETED, 0, "ended by gpuyard: it went on after its marker")
    if has_marker:
        return Conclusion(COMPLETED, 0, f"it ended with status {status} after its marker" if status else None)
    if was_stopped:
        return Conclusion(STOPPED, status or TERMINATED)  # exit status 0 after SIGTERM does not mean completed
    if was_closed:
        return Conclusion(FAILED, status or HUNG_UP, "its session was closed")
    if status:
        return Conclusion(FAILED, status)
    return Conclusion(COMPLETED, 0, writes_marker=True)  # the marker's text says that gpuyard wrote it


def start_command(launch: Launch, sockets: str) -> tuple[str, ...]:
    """Return the launch's command, or for a task that of its runner. `sockets` is the folder of its socket."""
    task = launch.task
    if task is None:
        return launch.command
    spec = {
        **to_builtins(task),
        "command": list(launch.command),
        "key": launch.key,
        "job": launch.job_id,
        "attempt": launch.attempt,
        "sockets": sockets,
        "gpu": launch.place,
        "retried": launch.retried,
        "session": session_on(task, launch.place),
        "log_cap": launch.log_cap,
    }
    return python_command("gpuyard.engines.session.runner", json.dumps(spec))
