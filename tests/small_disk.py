"""A disk of a given size for one test: a tmpfs, which only root can mount."""

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted_disk(folder: Path, options: str) -> Iterator[Path]:
    """Mount a disk on the folder, which is created if it is missing. Skips the test where that is impossible."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
