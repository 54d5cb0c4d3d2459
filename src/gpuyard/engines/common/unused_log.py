"""Logs of attempts that have not begun: they have the sticky bit until their programs are started.

The daemon creates them for prefetched attempts, and the keeper for all others. The bit tells such a log from the empty
log of an attempt that has begun. If the daemon is killed, `gpuyard restore` does not name the job as started, and the
next daemon uses the log again. If the keeper is killed before it starts the program, the job is queued again.

The sticky bit has no meaning on files, no umask removes it, and the log can be read as any other. A file system that
stores no modes does not show it: there each log counts as one of an attempt that has begun.

Uses the standard library alone, as the keeper does.
"""

import os
import stat

_MODE = 0o600 | stat.S_ISVTX
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC


def create_log(path: str) -> bool:
    """Create an unused log, unless there is one. Return False if it cannot be created, or another file is in its place.

    Never opens a file that exists.
    """
    try:
        os.close(os.open(path, _CREATE | os.O_EXCL, _MODE))
    except FileExistsError:
        return is_unused(path)
    except OSError:
        return False
    return True


def open_log(path: str) -> int:
    """Open a log to append to it; a new one is unused. Raises OSError."""
    return os.open(path, _CREATE | os.O_APPEND | os.O_NOFOLLOW, _MODE)


def begin_log(descriptor: int) -> None:
    """Note that an open log is used now. Call it before the program starts. Raises OSError."""
    mode = os.fstat(descriptor).st_mode
    if mode & stat.S_ISVTX:
        os.fchmod(descriptor, stat.S_IMODE(mode) & ~stat.S_ISVTX)


def is_unused(path: str | os.PathLike[str]) -> bool:
    """Return whether it is a log of ours whose attempt has not begun. Return False in case of doubt."""
    try:
        log = os.lstat(path)
    except OSError:
        return False
    is_own_file = stat.S_ISREG(log.st_mode) and log.st_uid == os.geteuid() and log.st_nlink == 1
    return is_own_file and bool(log.st_mode & stat.S_ISVTX) and not log.st_size
