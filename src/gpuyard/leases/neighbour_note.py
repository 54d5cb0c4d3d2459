"""Say once a day that another user leases the same GPUs in another directory."""

import contextlib
import os
import time
from pathlib import Path

from gpuyard.config import state_dir
from gpuyard.leases.neighbours import describe, find_neighbours
from gpuyard.system.private_files import PrivateFileError, make_folder, open_own

# The file's time is when to look again. That way most commands only ask for a file's time.
_STAMP = "neighbours-checked"
_LOOK_AGAIN_S, _SAY_AGAIN_S = 3600.0, 86400.0


def due_note(folder: Path) -> str | None:
    """Return a line if another user has another lease directory than `folder`, and that was not said today."""
    now, stamp = time.time(), state_dir() / _STAMP
    with contextlib.suppress(OSError):
        if now < stamp.stat().st_mtime <= now + _SAY_AGAIN_S:
            return None
    line = describe(find_neighbours(folder), folder)
    with contextlib.suppress(OSError, PrivateFileError):  # then it is said again
        make_folder(str(stamp.parent))
        descriptor = open_own(str(stamp), os.O_WRONLY | os.O_CREAT)
        due = now + (_LOOK_AGAIN_S if line is None else _SAY_AGAIN_S)
        os.utime(descriptor, (due, due))
        os.close(descriptor)
    return line
