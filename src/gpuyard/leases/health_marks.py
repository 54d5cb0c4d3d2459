"""Health marks: files in the ledger's directory that say what is wrong with a device, or that a user cleared it
(`owned_files.py`).

- Faults that the driver reports at any time need no mark. Marks make an Xid, which the driver reports once, known to
  the scripts of the user and to the next daemon, and record since when a fault was seen.
- Marks are written whole and without the mutex: the daemon that writes one has closed the device for itself already.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from gpuyard.core.health_figures import HealthFigures, HealthMark
from gpuyard.leases.drains import MARK
from gpuyard.leases.owned_files import OwnedFiles, write_file
from gpuyard.system.process_identity import user_name


def mark_files(folder: Path) -> OwnedFiles[HealthMark]:
    return OwnedFiles(folder, _decode_mark)


def _decode_mark(content: bytes, uid: int) -> HealthMark:
    mark = msgspec.json.decode(content, type=HealthMark)
    return replace(mark, since=min(mark.since, time.time()), uid=uid, user=user_name(uid))


def add_mark(folder: Path, mark: HealthMark) -> None:
    """Write a mark of this user. Raises OSError."""
    write_file(folder, MARK, msgspec.json.encode(mark))


def remove_marks(folder: Path, is_over: Callable[[HealthMark], bool]) -> None:
    """Remove those marks of this user for which `is_over` is true. Raises OSError."""
    mark_files(folder).remove(MARK, lambda mark: mark.uid == os.geteuid() and is_over(mark))


def accept_figures(folder: Path, device_id: str, figures: HealthFigures | None) -> None:
    """Clear the device for this user: its marks go, and one that accepts its present figures takes their place."""
    accepted = replace(figures or HealthFigures(), xids=(), is_lost=False)
    mark = HealthMark(device_id=device_id, since=time.time(), accepted=accepted)
    remove_marks(folder, lambda each: each.device_id == device_id)
    add_mark(folder, mark)
