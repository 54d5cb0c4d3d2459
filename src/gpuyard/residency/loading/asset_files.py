"""Inspect and open the files of assets, and write to the memory of the caller. Every failure is an AssetError."""

import contextlib
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from typing import Any, Protocol

import msgspec
import numpy as np

from gpuyard.errors import AssetError


class FileStat(msgspec.Struct, frozen=True):
    """Size and modification time, to detect that a file has changed."""

    nbytes: int
    changed_ns: int


def stat_file(path: str) -> FileStat:
    """Return the stat of a regular file. Rejects other files, because opening a pipe would wait for its writer."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise AssetError(path, "it is a folder" if stat.S_ISDIR(status.st_mode) else "it is not a regular file")
    return _file_stat(status)


def check_unchanged(path: str, before: FileStat, now: FileStat) -> None:
    if now != before:
        raise AssetError(path, "it was changed during the run", hint="run this again")


@contextlib.contextmanager
def opened(path: str) -> Iterator[tuple[BufferedReader, FileStat]]:
    stat_file(path)
    try:
        with open(path, "rb") as file:
            yield file, _file_stat(os.fstat(file.fileno()))
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: str, error: OSError | ValueError) -> AssetError:
    """Return the AssetError. ValueError comes from impossible file names, such as those with a NUL."""
    if isinstance(error, FileNotFoundError):
        return AssetError(path, "there is no such file")
    return AssetError(path, f"it cannot be read: {getattr(error, 'strerror', None) or error}")


def _file_stat(status: os.stat_result) -> FileStat:
    return FileStat(nbytes=status.st_size, changed_ns=status.st_mtime_ns)


class Sink(Protocol):
    """A sequence of bytes, possibly in several parts of memory."""

    def views(self, offset: int, nbytes: int) -> list[memoryview]:
        """Return writable views in order, `nbytes` bytes in total."""
        ...


def write_array(sink: Sink, offset: int, array: np.ndarray[Any, Any]) -> None:
    """Write the bytes of a dense array. Uses numpy for the copy, because it releases the GIL."""
    content = array.reshape(-1).view(np.uint8)
    done = 0
    for view in sink.views(offset, array.nbytes):
        np.copyto(np.frombuffer(view, np.uint8), content[done : done + view.nbytes])
        done += view.nbytes
