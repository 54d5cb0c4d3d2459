"""Drains and health marks: small files in the ledger's directory that hold for their owner.

- A file of root or of the directory's owner holds for every user; those of other users are ignored. It never changes.
- A drain says that nothing new starts on a device. It is not locked: it holds until it is removed. Drains are made and
removed under the mutex, so a claim that is decided later respects them.
- A health mark says what is wrong with a device and since when, or that a user cleared it: an Xid, which the driver
reports once, becomes known to scripts and to the next daemon. Marks are written without the mutex: the daemon that
writes one has closed the device for itself already."""

import contextlib
import os
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gpuyard.ledger.lock_file import DRAIN, MARK, SKIPPED_ERRORS
from gpuyard.model.lease import Drain
from gpuyard.model.machine_snapshot import HealthMark
from gpuyard.model.printable_text import printable
from gpuyard.system.processes import user_name
from gpuyard.system.write_files import write_atomically

MAX_BYTES = 4096
LONGEST_REASON = 200

Record = TypeVar("Record")


class OwnedFiles(Generic[Record]):
    """The files of one kind that hold for this user. `decode` gets a content and the uid of its owner."""

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
        """Return the record; None if the file is not of this user, root or the directory's owner. Raises OSError."""
        try:
            descriptor = os.open(f"{self._folder}/{name}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in SKIPPED_ERRORS:
                return None
            raise  # for example no free descriptors: a skipped drain would open its device
        try:
            status = os.fstat(descriptor)
            owners = (os.geteuid(), 0, os.stat(self._folder).st_uid)
            if status.st_uid not in owners or not stat.S_ISREG(status.st_mode):
                return None
            return self._decode(os.read(descriptor, MAX_BYTES), status.st_uid)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        finally:
            os.close(descriptor)

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


class DrainRecord(Struct, frozen=True, kw_only=True):
    device_id: str
    since: float
    reason: str = ""


def drain_files(folder: Path) -> OwnedFiles[Drain]:
    def decode(content: bytes, uid: int) -> Drain:
        record = msgspec.json.decode(content, type=DrainRecord)
        since, reason = min(record.since, time.time()), printable(record.reason, LONGEST_REASON)
        return Drain(device_id=record.device_id, uid=uid, user=user_name(uid), since=since, reason=reason)

    return OwnedFiles(folder, decode)


def add_drain(folder: Path, device_id: str, reason: str, since: float) -> None:
    """Write a drain of this user. Call it while the mutex is held. Raises OSError."""
    write_file(folder, DRAIN, msgspec.json.encode(DrainRecord(device_id=device_id, since=since, reason=reason)))


def remove_drains(folder: Path, device_id: str) -> None:
    """Remove this user's drains of the device. Call it while the mutex is held. Raises OSError."""
    drain_files(folder).remove(DRAIN, lambda each: each.device_id == device_id and each.uid == os.geteuid())


def copy_drains(earlier: Path, folder: Path) -> list[str]:
    """Copy this user's drains and marks, under the mutex. Returns the earlier ones that hold for this user alone."""
    left = []
    with contextlib.suppress(OSError):  # a drain that cannot be read or written is lost, as with its directory
        status = os.stat(earlier)
        holds_for_others = os.geteuid() in (0, status.st_uid) and status.st_mode & 0o077
        for name in (*find_files(earlier, DRAIN), *find_files(earlier, MARK)):
            path = earlier / name
            found = path.lstat()
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
                write_atomically(folder / name, path.read_bytes(), exact_mode=0o644)
                left += [] if holds_for_others else [str(path)]
    return left


def mark_files(folder: Path) -> OwnedFiles[HealthMark]:
    def decode(content: bytes, uid: int) -> HealthMark:
        mark = msgspec.json.decode(content, type=HealthMark)
        return replace(mark, since=min(mark.since, time.time()), uid=uid, user=user_name(uid))

    return OwnedFiles(folder, decode)


def add_mark(folder: Path, mark: HealthMark) -> None:
    """Write a mark of this user. Raises OSError."""
    write_file(folder, MARK, msgspec.json.encode(mark))


def remove_marks(folder: Path, is_over: Callable[[HealthMark], bool]) -> None:
    """Remove those marks of this user for which `is_over` is true. Raises OSError."""
    mark_files(folder).remove(MARK, lambda mark: mark.uid == os.geteuid() and is_over(mark))
