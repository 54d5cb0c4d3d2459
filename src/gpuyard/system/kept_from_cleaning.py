"""Keeps a folder in /var/tmp from being emptied: many systems remove files there that were not used for 30 days.

`systemd-tmpfiles` leaves out a folder that a process has locked, and files with the sticky bit, which has no other
meaning for a file on Linux.
"""

import contextlib
import os
import stat
from collections.abc import Iterator

from gpuyard.system.file_locks import try_lock


@contextlib.contextmanager
def kept_from_cleaning(folder: str) -> Iterator[None]:
    """Lock the folder in this block. Mark the files in it, at first and in the end, so that they stay until the next
    time. Folders in it, such as that of the logs, are kept only while a process is in this block."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try_lock(descriptor, shared=True)
        _mark_files(descriptor)
        yield
        _mark_files(descriptor)
    finally:
        os.close(descriptor)


def _mark_files(folder: int) -> None:
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
            if stat.S_ISREG(mode):
                os.chmod(name, stat.S_IMODE(mode) | stat.S_ISVTX, dir_fd=folder)
