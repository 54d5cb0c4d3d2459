"""The manifest of what gpuyard writes outside its own folders: `outside-files` in the queue's folder, a line for each
path, written before the file is. `gpuyard uninstall` reads it."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from gpuyard.errors import EnvironmentFault
from gpuyard.system.file_locks import lock
from gpuyard.system.private_files import open_own

MANIFEST = "outside-files"
# A workspace, which stays; its logs; a queue's folder for a cluster; a folder of snapshots of code.
WORKSPACE, LOG, CLUSTER, SNAPSHOTS = KINDS = ("workspace", "log", "cluster", "snapshots")


def record_outside(queue: str | Path, kind: str, paths: Iterable[str | Path]) -> None:
    """Add the paths that the manifest in the queue's folder lacks."""
    lines = [json.dumps([kind, os.path.abspath(path)]) + "\n" for path in paths]
    try:
        with open(open_own(f"{queue}/{MANIFEST}"), "r+", encoding="ascii") as file:
            lock(file.fileno())
            known = set(file)
            file.writelines(line for line in dict.fromkeys(lines) if line not in known)
    except OSError as error:
        raise EnvironmentFault(f"{queue}/{MANIFEST} cannot be written: {error.strerror}") from error


def read_outside(queue: str | Path) -> dict[str, list[str]]:
    """Return the paths by their kind. Raises PrivateFileError if other users could have written the manifest."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    if os.path.lexists(f"{queue}/{MANIFEST}"):
        with open(open_own(f"{queue}/{MANIFEST}", os.O_RDONLY), encoding="ascii") as file:
            for kind, path in map(json.loads, file):
                found[kind].append(path)
    return found
