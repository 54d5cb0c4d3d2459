"""Folders that are nested more deeply than Python recurses."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

DEEP = 1500
_NAME = "d"


@contextlib.contextmanager
def deep_folders(folder: Path, depth: int = DEEP) -> Iterator[str]:
    """Make nested folders, each with a file, and yield the path of the last one in this folder. They are removed
    afterwards: pytest removes its folders recursively."""
    here = os.open(folder, os.O_RDONLY)
    try:
        for _ in range(depth):
            os.mkdir(_NAME, dir_fd=here)
            above, here = here, os.open(_NAME, os.O_RDONLY, dir_fd=here)
            os.close(above)
            os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
        yield "/".join([_NAME] * depth)
    finally:
        os.close(here)
        subprocess.run(["/bin/rm", "-rf", str(folder / _NAME)], check=True)
