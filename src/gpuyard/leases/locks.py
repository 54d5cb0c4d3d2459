"""Who really holds a lock, as the kernel knows: nobody can keep another user's dead lease alive in that user's name."""

import os
from collections.abc import Mapping
from pathlib import Path

# The pids of those who took a lock on a file, by the file's device (major, minor) and inode.
LockTable = Mapping[tuple[int, int, int], tuple[int, ...]]


def lock_table(locks: Path = Path("/proc/locks")) -> LockTable:
    """All locks that the kernel tells of; none where it does not."""
    try:
        lines = locks.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    table: dict[tuple[int, int, int], tuple[int, ...]] = {}
    for words in map(str.split, lines):
        if len(words) >= 6 and words[1] == "FLOCK" and words[5].count(":") == 2:
            major, minor, inode = words[5].split(":")
            key = (int(major, 16), int(minor, 16), int(inode))
            table[key] = (*table.get(key, ()), int(words[4]))
    return table


def is_held_for(uid: int, maker: int, device: int, inode: int, table: LockTable) -> bool:
    """Whether somebody of the file's owner, `uid`, is among those who hold it.

    Where the kernel does not tell (another container's process, one that has ended and left the lock to its children,
    no Linux), the answer is yes: then the owner is all there is to go by. The pid that made the file is not looked up:
    where it has ended and left the lock to its children, the number may be another user's by now.
    """
    pids = table.get((os.major(device), os.minor(device), inode), ())
    return not pids or any(pid == maker or _uid_of(pid) in (None, uid, 0) for pid in pids)


def _uid_of(pid: int) -> int | None:
    """The real user, from the text: the owner of the /proc folder is root for whoever hides its memory."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("Uid:")), None)
