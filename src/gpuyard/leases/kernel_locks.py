"""Find out from the kernel who holds a lock, so that no user can keep another user's dead lease alive."""

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

# The pids of the processes that locked a file, by the file's device (major, minor) and inode.
Pids = Mapping[tuple[int, int, int], tuple[int, ...]]


class LockTable:
    """All file locks at one moment, read when first needed: reading them takes longer than reading the ledger."""

    def __init__(self, source: Path = Path("/proc/locks")) -> None:
        self._source = source

    def is_held_for(self, uid: int, maker: int, device: int, inode: int) -> bool:
        """Return whether a process of the file's owner, `uid`, or of root holds the lock.

        Return True if the kernel does not know the holder: it is in another container, it has ended and left the lock
        to its children, or this is not Linux. The user of `maker`, the pid that made the file, is not checked: if that
        process has ended and left the lock to its children, another user's process may have its pid.
        """
        pids = self.pids.get((os.major(device), os.minor(device), inode), ())
        return not pids or any(pid == maker or _uid_of(pid) in (None, uid, 0) for pid in pids)

    @cached_property
    def pids(self) -> Pids:
        """Empty if the kernel does not list locks."""
        try:
            lines = self._source.read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:
            return {}
        table: dict[tuple[int, int, int], tuple[int, ...]] = {}
        for fields in map(str.split, lines):
            if len(fields) >= 6 and fields[1] == "FLOCK" and fields[5].count(":") == 2:
                major, minor, inode = fields[5].split(":")
                key = (int(major, 16), int(minor, 16), int(inode))
                table[key] = (*table.get(key, ()), int(fields[4]))
        return table


def _uid_of(pid: int) -> int | None:
    """Return the real uid from the status file: /proc/PID itself belongs to root if the process is not dumpable."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("Uid:")), None)
