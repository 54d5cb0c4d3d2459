"""Who really holds a lock, as the kernel knows: nobody can keep another user's dead lease alive in that user's name."""

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

# The pids of those who took a lock on a file, by the file's device (major, minor) and inode.
Pids = Mapping[tuple[int, int, int], tuple[int, ...]]


class LockTable:
    """All locks of one moment, read when the first one matters: to read them takes longer than all the rest."""

    def __init__(self, source: Path = Path("/proc/locks")) -> None:
        self._source = source

    def is_held_for(self, uid: int, maker: int, device: int, inode: int) -> bool:
        """Whether somebody of the file's owner, `uid`, is among those who hold it.

        Where the kernel does not tell (another container's process, one that has ended and left the lock to its
        children, no Linux), the answer is yes: then the owner is all there is to go by. The pid that made the file is
        not looked up: where it has ended and left the lock to its children, the number may be another user's by now.
        """
        pids = self.pids.get((os.major(device), os.minor(device), inode), ())
        return not pids or any(pid == maker or _uid_of(pid) in (None, uid, 0) for pid in pids)

    @cached_property
    def pids(self) -> Pids:
        """None where the kernel does not tell."""
        try:
            lines = self._source.read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:
            return {}
        table: dict[tuple[int, int, int], tuple[int, ...]] = {}
        for words in map(str.split, lines):
            if len(words) >= 6 and words[1] == "FLOCK" and words[5].count(":") == 2:
                major, minor, inode = words[5].split(":")
                key = (int(major, 16), int(minor, 16), int(inode))
                table[key] = (*table.get(key, ()), int(words[4]))
        return table


def _uid_of(pid: int) -> int | None:
    """The real user, from the text: the owner of the /proc folder is root for whoever hides its memory."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("Uid:")), None)
