"""Folders that are nested more deeply than Python recurses."""

import os
from pathlib import Path

DEEP = 1500


def make_deep(folder: Path, depth: int = DEEP, name: str = "d") -> None:
    """Make nested folders, each with a file."""
    here = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=here)
        above, here = here, os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(above)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)
