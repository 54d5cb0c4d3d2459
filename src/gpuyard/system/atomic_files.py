"""Writes files atomically: readers see the old content or the new, never a part. Uses the standard library alone."""

import contextlib
import os
from pathlib import Path

from gpuyard.errors import EnvironmentFault

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def write_atomically(
    path: str | Path, content: bytes, *, mode: int = 0o666, exact_mode: int | None = None, is_synced: bool = True
) -> None:
    """Replace the file, or create it. After an OSError it is as before, and no temporary file is left.

    mode: permissions for the file, less those in the umask.
    exact_mode: permissions regardless of the umask; replaces `mode`.
    is_synced: write to disk before the file gets its name, so that it survives a power failure.
    """
    draft = f"{os.path.dirname(path) or '.'}/.{os.urandom(8).hex()}.gpuyard"  # short: `path` may have the longest name
    try:
        with open(os.open(draft, _NEW, mode if exact_mode is None else 0o600), "wb") as file:
            file.write(content)
            file.flush()
            if is_synced:
                os.fsync(file.fileno())
            if exact_mode is not None:
                os.fchmod(file.fileno(), exact_mode)
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def sync(path: str | Path) -> None:
    """Write a file to disk, or a folder with the names in it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: bytes) -> None:
    """Call `write_atomically`, and raise EnvironmentFault with the path if that fails."""
    try:
        write_atomically(path, content)
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be written: {error.strerror}") from error
