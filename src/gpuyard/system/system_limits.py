"""Limits of the system: on memory (`ulimit -v`), on open files, and errors that pass when a person frees something.

Each thread takes 8 MB of address space for its stack, and 64 MB for what it allocates. Where that is too much, a thread
may end before it has begun, and Python's `Thread.start` then waits for it for ever. It uses the standard library alone.
"""

import errno
import os
import resource
import signal
import sys
import threading
from types import FrameType


def is_memory_limited() -> bool:
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def spare_address_space() -> None:
    """Where it is limited, give threads small stacks and one heap, and let no start of a thread wait for ever. Call it
    in the main thread, before other threads start."""
    if not is_memory_limited():
        return
    import ctypes  # takes some milliseconds

    threading.stack_size(1 << 20)
    if (set_option := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:  # glibc's
        set_option(-8, 1)  # M_ARENA_MAX
    watch_thread_starts(every_s=5.0)


def watch_thread_starts(every_s: float) -> None:
    """Raise RuntimeError in the main thread from a `Thread.start` that has waited for one to two times `every_s`. It is
    that of a thread that cannot be started."""
    waiting: list[object] = [None]

    def look(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001 - of a signal handler
        while frame is not None and frame.f_code is not threading.Thread.start.__code__:
            frame = frame.f_back
        thread = None if frame is None else frame.f_locals["self"]
        if thread is not None and thread is waiting[0]:
            waiting[0] = None
            raise RuntimeError("can't start new thread: it ended before it had begun")
        waiting[0] = thread

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, every_s, every_s)


def open_files_limit() -> int:
    return _as_number(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def raise_open_files_limit() -> int:
    """Raise the limit to 1,024 open files, if it is lower and may be raised. Return the limit before."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # More is of no use: steps and connections take fewer, and select(), which programs of ours may use, fails above.
    enough = min(1024, _as_number(most))
    if _as_number(before) < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, most))
    return _as_number(before)


def first_reserved_descriptor() -> int:
    """Return the descriptor from which on few are left, which leases leave to other uses: the last 64, or a quarter.
    The system gives the lowest free number, so the number of a new descriptor counts the open files."""
    most = open_files_limit()
    return most - min(64, most // 4)


def _as_number(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


_REMEDIES = {
    errno.EAGAIN: "end some processes, or raise the limit on processes (`ulimit -u`, or TasksMax= of its service)",
    errno.ENOMEM: "free some memory, or raise the limit on it (`ulimit -v`)",
    errno.EMFILE: "raise the limit on open files (`ulimit -n`), then run `gpuyard daemon restart`",
    errno.ENFILE: "close some files, or raise the system's limit (`sysctl fs.file-max`)",
    errno.ENOSPC: "free some disk space or inodes: see `df -h` and `df -i`",
    errno.EDQUOT: "free some of your disk quota: see `quota`",
    errno.EIO: "check the disk: see `dmesg`",
    errno.EROFS: "the disk may have errors: see `dmesg`, and mount it for writing again",
}


def passing_limit(error: BaseException) -> OSError | None:
    """Return the error if it is no bug, but a limit of the system that passes; Python reports some without a number."""
    if isinstance(error, MemoryError):
        return OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        number = errno.ENOMEM if is_memory_limited() else errno.EAGAIN
        return OSError(number, os.strerror(number))
    return error if isinstance(error, OSError) and passes(error) else None


def passes(error: OSError) -> bool:
    return error.errno in _REMEDIES


def remedy_of(error: OSError) -> str | None:
    """Return what a person can do about the error; None for an error that does not pass."""
    return _REMEDIES.get(error.errno or 0)
