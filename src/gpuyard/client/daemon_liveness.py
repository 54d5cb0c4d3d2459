"""Whether a daemon runs: it holds the lock on `daemon.lock`; and whether one that does not answer is stopped, hangs, or
is busy.

- Only the lock counts; the record in the file, pid and start time, names its holder. The file stays when the daemon
ends: removing it would let two daemons lock two files of one name. No job keeps the lock of a killed daemon.
- To check the lock is to take it, shared, for a moment. A starting daemon that finds it taken by such a check tries
again; if a living daemon holds it, the new one gives up at once."""

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gpuyard.client import paths
from gpuyard.errors import EnvironmentFault
from gpuyard.system.file_locks import try_lock, unlock
from gpuyard.system.private_files import make_folder, open_own
from gpuyard.system.processes import start_time


@contextlib.contextmanager
def hold_daemon_lock(path: str | Path) -> Iterator[Callable[[], bool]]:
    """Hold the lock, or raise EnvironmentFault. Yields whether the locked file is still at `path`."""
    try:
        make_folder(os.path.dirname(path))
        descriptor = open_own(str(path), os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise EnvironmentFault(
            f"the daemon's lock {path} cannot be opened: {error.strerror}", hint="name another folder with GPUYARD_HOME"
        ) from error

    def is_there() -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.lstat(path))
        except OSError as error:
            # Any other error, such as a file system that does not answer, says nothing about the file.
            return error.errno not in (errno.ENOENT, errno.ENOTDIR)

    try:
        _lock(descriptor, path)
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()} {start_time(os.getpid())}\n".encode(), 0)
            yield is_there
        finally:
            os.ftruncate(descriptor, 0)
            unlock(descriptor)
    finally:
        os.close(descriptor)


def running_pid(path: str | Path) -> int | None:
    """Return the recorded pid of the daemon that holds the lock, or None if no daemon runs."""
    try:
        descriptor = open_own(str(path), os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        if try_lock(descriptor, shared=True):
            unlock(descriptor)
            return None
        return _recorded(descriptor)[0]
    finally:
        os.close(descriptor)


def await_end(path: str | Path, pid: int) -> None:
    """Wait until the daemon with this pid has ended. Meanwhile the next one may take the lock."""
    timeout_s = 30
    deadline = time.monotonic() + timeout_s
    while running_pid(path) == pid:
        if time.monotonic() > deadline:
            raise EnvironmentFault(
                f"the daemon (pid {pid}) has not ended after {timeout_s} s",
                hint=f"see its log; `kill -9 {pid}` harms no job",
            )
        time.sleep(0.02)


def _lock(descriptor: int, path: str | Path) -> None:
    deadline = time.monotonic() + 2.0  # another process may check the lock at this moment
    while not try_lock(descriptor):
        pid, started = _recorded(descriptor)
        is_alive = pid is not None and str(start_time(pid)) == started
        if is_alive or time.monotonic() > deadline:
            raise EnvironmentFault(
                f"the daemon already runs (pid {pid or 'unknown'})",
                hint=f"commands reach it by themselves; `kill {pid}` ends it" if pid else f"see `lsof {path}`",
            )
        time.sleep(0.001)


def _recorded(descriptor: int) -> tuple[int | None, str]:
    parts = os.pread(descriptor, 100, 0).decode("ascii", "replace").split()
    return (int(parts[0]), parts[1]) if len(parts) == 2 and parts[0].isdecimal() else (None, "")


class SilentDaemon(EnvironmentFault):
    """The daemon runs and does not answer. It may still carry out the request later."""


def silent(pid: int | None) -> SilentDaemon:
    if pid is None:
        return SilentDaemon("the daemon does not answer", hint=f"see {paths.log_path()}")
    ends = f"`kill -9 {pid}` ends it and harms no job; the next command starts another daemon"
    if is_stopped(pid):
        return SilentDaemon(
            f"the daemon (pid {pid}) is stopped and does not answer",
            hint=f"`kill -CONT {pid}` continues it, and it may then do what it was asked; {ends}",
        )
    return SilentDaemon(f"the daemon (pid {pid}) does not answer", hint=f"see {paths.log_path()}; {ends}")


def is_stopped(pid: int | None) -> bool:
    """Return whether the process is stopped, as by SIGSTOP or a debugger."""
    import psutil

    try:
        return pid is not None and psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False
