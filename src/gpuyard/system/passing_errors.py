"""Errors of the system that pass, by themselves or when a person frees something: try again later."""

import errno
import os

from gpuyard.system.memory_limit import is_memory_limited

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
