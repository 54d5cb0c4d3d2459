"""Looking at files that hold assets, and opening them: whatever stands in the way is an AssetError."""

import contextlib
import os
import stat
from collections.abc import Iterator
from io import BufferedReader

import msgspec

from gpuyard.errors import AssetError


class FileStat(msgspec.Struct, frozen=True):
    """What tells a file from what it was before."""

    nbytes: int
    changed_ns: int


def look_at(path: str) -> FileStat:
    """At a regular file: opening a pipe would wait for whoever writes to it."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise AssetError(path, "it is a folder" if stat.S_ISDIR(status.st_mode) else "it is not a regular file")
    return _look(status)


def check_unchanged(path: str, before: FileStat, now: FileStat) -> None:
    if now != before:
        raise AssetError(path, "it was changed after it was first looked at", hint="run this again")


@contextlib.contextmanager
def opened(path: str) -> Iterator[tuple[BufferedReader, FileStat]]:
    look_at(path)
    try:
        with open(path, "rb") as file:
            yield file, _look(os.fstat(file.fileno()))
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: str, error: OSError | ValueError) -> AssetError:
    """ValueError is what a name gives that no file can have, such as one with a NUL."""
    if isinstance(error, FileNotFoundError):
        return AssetError(path, "there is no such file")
    return AssetError(path, f"it cannot be read: {getattr(error, 'strerror', None) or error}")


def _look(status: os.stat_result) -> FileStat:
    return FileStat(nbytes=status.st_size, changed_ns=status.st_mtime_ns)
