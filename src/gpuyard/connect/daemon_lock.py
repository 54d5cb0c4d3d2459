"""One daemon per user: whoever holds the lock on `daemon.lock` is the daemon.

Rules:
- The lock is the truth; the record inside, pid and start time, only names its holder.
- The file stays when the daemon ends: removing it would let two daemons lock two files of one name.
- The descriptor does not outlive an exec, so no job keeps the lock of a daemon that was killed.
- To see whether it is held one has to take it, shared, for a moment. A daemon that meets such a look tries again;
  one that meets a living holder gives up at once.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from gpuyard.errors import EnvironmentFault
from gpuyard.system.file_locks import try_lock, unlock
from gpuyard.system.process_identity import start_time

_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW
_LONGEST_LOOK_S, _PAUSE_S = 2.0, 0.001
_LONGEST_RECORD = 100
_ENDED_WITHIN_S, _LOOK_AGAIN_S = 30.0, 0.02


@contextlib.contextmanager
def hold_daemon_lock(path: str | Path) -> Iterator[None]:
    """EnvironmentFault where another daemon holds it."""
    descriptor = _open(Path(path))
    try:
        _lock(descriptor, Path(path))
        try:
            _write(descriptor, f"{os.getpid()} {start_time(os.getpid())}\n")
            yield
        finally:
            os.ftruncate(descriptor, 0)
            unlock(descriptor)
    finally:
        os.close(descriptor)


def running_pid(path: str | Path) -> int | None:
    """The pid of the daemon that holds the lock, as it wrote it down."""
    try:
        descriptor = os.open(path, os.O_RDONLY | _FLAGS)
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
    """Of the daemon with this pid, which was told to stop; the next one may hold the lock by then."""
    deadline = time.monotonic() + _ENDED_WITHIN_S
    while running_pid(path) == pid:
        if time.monotonic() > deadline:
            raise EnvironmentFault(
                f"the daemon (pid {pid}) has not ended after {_ENDED_WITHIN_S:.0f} s",
                hint=f"its log says more; `kill -9 {pid}` harms no job",
            )
        time.sleep(_LOOK_AGAIN_S)


def _open(path: Path) -> int:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)
    except OSError as error:
        raise EnvironmentFault(
            f"the daemon's lock {path} cannot be opened: {error.strerror}",
            hint="name another folder with GPUYARD_HOME",
        ) from error


def _lock(descriptor: int, path: Path) -> None:
    deadline = time.monotonic() + _LONGEST_LOOK_S
    while not try_lock(descriptor):
        pid, started = _recorded(descriptor)
        if _is_alive(pid, started) or time.monotonic() > deadline:
            raise EnvironmentFault(
                f"the daemon already runs (pid {pid or 'unknown'})",
                hint=f"commands reach it by themselves; `kill {pid}` ends it" if pid else f"see `lsof {path}`",
            )
        time.sleep(_PAUSE_S)


def _write(descriptor: int, record: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, record.encode(), 0)


def _recorded(descriptor: int) -> tuple[int | None, str]:
    """Nothing where the holder has not written yet."""
    words = os.pread(descriptor, _LONGEST_RECORD, 0).decode("ascii", "replace").split()
    if len(words) == 2 and words[0].isdecimal():
        return int(words[0]), words[1]
    return None, ""


def _is_alive(pid: int | None, started: str) -> bool:
    return pid is not None and str(start_time(pid)) == started
