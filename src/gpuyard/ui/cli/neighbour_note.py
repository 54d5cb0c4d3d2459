"""Say once a day that another user leases the same GPUs in another directory."""

import os
import time

from gpuyard.connect import paths
from gpuyard.errors import EnvironmentFault

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

# The file's time is when to look again. That way most commands only ask for a file's time.
_STAMP = "neighbours-checked"
_LOOK_AGAIN_S, _SAY_AGAIN_S = 3600.0, 86400.0


def note_neighbours(folder: "Path | None" = None) -> None:
    """Print a line to standard error if another user has another lease directory than `folder`, or than the queue."""
    now = time.time()
    try:
        stamp = os.path.join(paths.state_folder(), _STAMP)
        if now < os.stat(stamp).st_mtime <= now + _SAY_AGAIN_S:
            return
    except OSError:
        pass
    except EnvironmentFault:
        return  # there is no folder to remember it
    from gpuyard.leases.directory_record import queue_directory
    from gpuyard.leases.neighbours import describe, find_neighbours
    from gpuyard.system.private_files import make_folder, open_own
    from gpuyard.ui.cli.terminal import note

    folder = folder or queue_directory()
    line = describe(find_neighbours(folder), folder) if folder is not None else None
    if line is not None:
        note(f"gpuyard: {line}")
    try:
        make_folder(paths.state_folder())
        descriptor = open_own(stamp, os.O_WRONLY | os.O_CREAT)
        due = now + (_LOOK_AGAIN_S if line is None else _SAY_AGAIN_S)
        os.utime(descriptor, (due, due))
        os.close(descriptor)
    except OSError:
        pass  # it is said again
