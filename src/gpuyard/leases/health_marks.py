"""Health marks: files in the ledger's directory that say what is wrong with a device, or that a user cleared it.

- As with drains, a mark holds for the owner of its file; one of root or of the directory's owner holds for every user.
- Faults that the driver reports at any time need no mark. Marks make an Xid, which the driver reports once, known to
  the scripts of the user and to the next daemon, and record since when a fault was seen.
- A file never changes, so each is read once. Marks are written whole and without the mutex: the daemon that writes one
  has closed the device for itself already.
"""

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from gpuyard.core.health_figures import HealthFigures, HealthMark
from gpuyard.leases.drains import MARK, MAX_BYTES, read_owned
from gpuyard.system.atomic_files import write_atomically
from gpuyard.system.process_identity import user_name


class HealthMarkReader:
    """Reads the marks of one directory that hold for this user."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._known: dict[tuple[str, int], HealthMark | None] = {}  # None: another user's, or not readable as a mark

    def read(self, files: Mapping[str, int]) -> tuple[HealthMark, ...]:
        """Return the marks in these files, given as inodes by name. Raises OSError."""
        if not files:
            return ()
        known = self._known
        self._known = {each: known[each] if each in known else self._read(each[0]) for each in files.items()}
        return tuple(mark for mark in self._known.values() if mark is not None)

    def _read(self, name: str) -> HealthMark | None:
        found = read_owned(self._folder, name)
        if found is None:
            return None
        content, uid = found
        try:
            mark = msgspec.json.decode(content, type=HealthMark)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        return replace(mark, since=min(mark.since, time.time()), uid=uid, user=user_name(uid))


def find_marks(folder: Path) -> dict[str, int]:
    """Return the inodes of the files of marks, by name. Raises OSError."""
    with os.scandir(folder) as entries:
        return {entry.name: entry.inode() for entry in entries if entry.name.endswith(MARK)}


def add_mark(folder: Path, mark: HealthMark) -> None:
    """Write a mark of this user. Raises OSError."""
    content = msgspec.json.encode(mark)
    assert len(content) <= MAX_BYTES
    write_atomically(folder / f"{os.getpid()}-{os.urandom(4).hex()}{MARK}", content, exact_mode=0o644)


def remove_marks(folder: Path, is_over: Callable[[HealthMark], bool]) -> None:
    """Remove those marks of this user for which `is_over` is true. Raises OSError."""
    reader = HealthMarkReader(folder)
    for name, inode in find_marks(folder).items():
        found = reader.read({name: inode})
        if any(mark.uid == os.geteuid() and is_over(mark) for mark in found):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(folder / name)


def accept_figures(folder: Path, device_id: str, figures: HealthFigures | None) -> None:
    """Clear the device for this user: its marks go, and one that accepts its present figures takes their place."""
    accepted = replace(figures or HealthFigures(), xids=(), is_lost=False)
    mark = HealthMark(device_id=device_id, since=time.time(), accepted=accepted)
    remove_marks(folder, lambda each: each.device_id == device_id)
    add_mark(folder, mark)
