"""Errors of the system that pass, by themselves or when a person frees something: try again later.

Uses the standard library alone.
"""

import errno

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


def passes(error: OSError) -> bool:
    return error.errno in _REMEDIES


def remedy_of(error: OSError) -> str | None:
    """Return what a person can do about the error; None for an error that does not pass."""
    return _REMEDIES.get(error.errno or 0)
