"""Drains: files in the ledger's directory that say that nothing new starts on a device.

- A drain holds for the owner of its file. A drain of root or of the directory's owner holds for every user. Files of
  other users are ignored: no user can close a device for others.
- A drain is not locked: it holds until it is removed, also after a restart of the machine.
- Drains are made and removed under the ledger's mutex, so a claim that is decided after `add_drain` respects it.
- A file never changes, so each is read once (`DrainReader`).
"""

import contextlib
import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from gpuyard.core.lease import Drain
from gpuyard.core.printable_text import printable
from gpuyard.leases.lock_file import SKIPPED_ERRORS
from gpuyard.system.atomic_files import write_atomically
from gpuyard.system.process_identity import user_name

DRAIN = ".drain"
MARK = ".health"  # of a health mark, see `health_marks.py`
LONGEST_REASON = 200
MAX_BYTES = 4096
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class DrainRecord(Struct, frozen=True, kw_only=True):
    device_id: str
    since: float
    reason: str = ""


class DrainReader:
    """Reads the drains of one directory that hold for this user."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._known: dict[tuple[str, int], Drain | None] = {}  # None: another user's, or not readable as a drain

    def read(self, files: Mapping[str, int]) -> tuple[Drain, ...]:
        """Return the drains in these files, given as inodes by name."""
        if not files:
            return ()
        known = self._known
        self._known = {each: known[each] if each in known else self._read(each[0]) for each in files.items()}
        return tuple(drain for drain in self._known.values() if drain is not None)

    def _read(self, name: str) -> Drain | None:
        found = read_owned(self._folder, name)
        if found is None:
            return None
        content, uid = found
        try:
            record = msgspec.json.decode(content, type=DrainRecord)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        return Drain(
            device_id=record.device_id,
            uid=uid,
            user=user_name(uid),
            since=min(record.since, time.time()),
            reason=printable(record.reason, LONGEST_REASON),
        )


def read_owned(folder: str, name: str) -> tuple[bytes, int] | None:
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


def add_drain(folder: Path, device_id: str, reason: str, since: float) -> None:
    """Write a drain of this user. Call it while the mutex is held. Raises OSError."""
    content = msgspec.json.encode(DrainRecord(device_id=device_id, since=since, reason=reason))
    write_atomically(folder / f"{os.getpid()}-{os.urandom(4).hex()}{DRAIN}", content, exact_mode=0o644)


def remove_drains(folder: Path, device_id: str) -> None:
    """Remove this user's drains of the device. Call it while the mutex is held. Raises OSError."""
    reader = DrainReader(folder)
    for entry in list(os.scandir(folder)):
        if not entry.name.endswith(DRAIN):
            continue
        found = reader.read({entry.name: entry.inode()})
        if any(drain.device_id == device_id and drain.uid == os.geteuid() for drain in found):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.path)


def copy_drains(earlier: Path, folder: Path) -> list[str]:
    """Copy this user's drains and health marks into another directory. Call it while its mutex is held.

    Returns the files in `earlier` that are not needed there any more: those that hold for this user alone.
    """
    left = []
    with contextlib.suppress(OSError):  # a drain that cannot be read or written is lost, as with its directory
        status = os.stat(earlier)
        holds_for_others = os.geteuid() in (0, status.st_uid) and status.st_mode & 0o077
        for entry in list(os.scandir(earlier)):
            is_mine = entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
            if entry.name.endswith((DRAIN, MARK)) and is_mine:
                write_atomically(folder / entry.name, Path(entry.path).read_bytes(), exact_mode=0o644)
                left += [] if holds_for_others else [entry.path]
    return left
