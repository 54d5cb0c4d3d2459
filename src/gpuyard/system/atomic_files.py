"""Folders that recipes keep things in: changed by one at a time, in files that are there as a whole or not at all."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from gpuyard.errors import EnvironmentFault


def write_whole(path: Path, content: bytes) -> None:
    """All of it, on disk, or what was there before."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise EnvironmentFault(f"{path} cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Of two who change what is in it at once, one waits for the other."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
