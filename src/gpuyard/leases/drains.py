"""Drains: files in the ledger's directory that say that nothing new starts on a device (`owned_files.py`).

- A drain is not locked: it holds until it is removed, also after a restart of the machine.
- Drains are made and removed under the ledger's mutex, so a claim that is decided after `add_drain` respects it.
"""

import contextlib
import os
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from gpuyard.core.lease import Drain
from gpuyard.core.printable_text import printable
from gpuyard.leases.owned_files import OwnedFiles, own_files, write_file
from gpuyard.system.atomic_files import write_atomically
from gpuyard.system.process_identity import user_name

DRAIN = ".drain"
MARK = ".health"  # of a health mark, see `health_marks.py`
LONGEST_REASON = 200


class DrainRecord(Struct, frozen=True, kw_only=True):
    device_id: str
    since: float
    reason: str = ""


def drain_files(folder: Path) -> OwnedFiles[Drain]:
    return OwnedFiles(folder, _decode_drain)


def _decode_drain(content: bytes, uid: int) -> Drain:
    record = msgspec.json.decode(content, type=DrainRecord)
    return Drain(
        device_id=record.device_id,
        uid=uid,
        user=user_name(uid),
        since=min(record.since, time.time()),
        reason=printable(record.reason, LONGEST_REASON),
    )


def add_drain(folder: Path, device_id: str, reason: str, since: float) -> None:
    """Write a drain of this user. Call it while the mutex is held. Raises OSError."""
    write_file(folder, DRAIN, msgspec.json.encode(DrainRecord(device_id=device_id, since=since, reason=reason)))


def remove_drains(folder: Path, device_id: str) -> None:
    """Remove this user's drains of the device. Call it while the mutex is held. Raises OSError."""
    drain_files(folder).remove(DRAIN, lambda each: each.device_id == device_id and each.uid == os.geteuid())


def copy_drains(earlier: Path, folder: Path) -> list[str]:
    """Copy this user's drains and health marks into another directory. Call it while its mutex is held.

    Returns the files in `earlier` that are not needed there any more: those that hold for this user alone.
    """
    left = []
    with contextlib.suppress(OSError):  # a drain that cannot be read or written is lost, as with its directory
        status = os.stat(earlier)
        holds_for_others = os.geteuid() in (0, status.st_uid) and status.st_mode & 0o077
        for path in list(own_files(earlier, (DRAIN, MARK))):
            write_atomically(folder / path.name, path.read_bytes(), exact_mode=0o644)
            left += [] if holds_for_others else [str(path)]
    return left
