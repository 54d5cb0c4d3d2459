"""Small files in the ledger's directory that hold for their owner: drains and health marks.

- A file of root or of the directory's owner holds for every user. Files of other users are ignored: no user can decide
  for others.
- A file never changes, so each is read once.
"""

import contextlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from gpuyard.leases.lock_file import SKIPPED_ERRORS
from gpuyard.system.atomic_files import write_atomically

MAX_BYTES = 4096
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

Record = TypeVar("Record")


class OwnedFiles(Generic[Record]):
    """The files of one kind in one directory that hold for this user. `decode` returns the record of a content and the
    uid of its owner."""

    def __init__(self, folder: Path, decode: Callable[[bytes, int], Record]) -> None:
        self._folder = str(folder)
        self._decode = decode
        self._known: dict[tuple[str, int], Record | None] = {}  # None: another user's, or not readable as a record

    def read(self, files: Mapping[str, int]) -> tuple[Record, ...]:
        """Return the records in these files, given as inodes by name. Raises OSError."""
        if not files:
            return ()
        known = self._known
        self._known = {each: known[each] if each in known else self._read(each[0]) for each in files.items()}
        return tuple(record for record in self._known.values() if record is not None)

    def _read(self, name: str) -> Record | None:
        found = _read_owned(self._folder, name)
        if found is None:
            return None
        try:
            return self._decode(*found)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None

    def remove(self, ending: str, is_over: Callable[[Record], bool]) -> None:
        """Remove the files for which `is_over` is true. Raises OSError."""
        for name, inode in find_files(self._folder, ending).items():
            if any(map(is_over, self.read({name: inode}))):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{self._folder}/{name}")


def find_files(folder: str | Path, ending: str) -> dict[str, int]:
    """Return the inodes of the files of one kind, by name. Raises OSError."""
    with os.scandir(folder) as entries:
        return {entry.name: entry.inode() for entry in entries if entry.name.endswith(ending)}


def write_file(folder: Path, ending: str, content: bytes) -> None:
    """Write a new file of this user, whole. Raises OSError."""
    assert len(content) <= MAX_BYTES
    write_atomically(folder / f"{os.getpid()}-{os.urandom(4).hex()}{ending}", content, exact_mode=0o644)


def own_files(folder: Path, endings: tuple[str, ...]) -> Iterator[Path]:
    """Yield the files of these kinds that belong to this user. Raises OSError."""
    with os.scandir(folder) as entries:
        for entry in entries:
            is_mine = entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
            if is_mine and entry.name.endswith(endings):
                yield Path(entry.path)


def _read_owned(folder: str, name: str) -> tuple[bytes, int] | None:
    """Return the content of a file and its owner; None if it is gone, is no file, or belongs to another user than this
    one, root and the directory's owner. Raises OSError."""
    try:
        descriptor = os.open(f"{folder}/{name}", _READ)
    except OSError as error:
        if error.errno in SKIPPED_ERRORS:
            return None
        raise  # for example no free descriptors: a skipped drain would open its device
    try:
        status = os.fstat(descriptor)
        owners = (os.geteuid(), 0, os.stat(folder).st_uid)
        if status.st_uid not in owners or not stat.S_ISREG(status.st_mode):
            return None
        return os.read(descriptor, MAX_BYTES), status.st_uid
    finally:
        os.close(descriptor)
