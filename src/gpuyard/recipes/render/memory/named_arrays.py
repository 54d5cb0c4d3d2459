"""The files of assets, and an asset's arrays by name, as the renderer gets them. An asset is bytes plus a layout, the
same in RAM, in VRAM and in a streamed frame, so moving it is a single copy for any number of arrays. Arrays are views,
and may be strided: the columns of a PLY file stay in its rows. Every failure to read a file is an AssetError."""

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from io import BufferedReader
from typing import Any, Protocol

import msgspec
import numpy as np

from gpuyard.errors import AssetError
from gpuyard.recipes.render.memory.device_memory import Buffer, DeviceMemory


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
    return FileStat(status.st_size, status.st_mtime_ns)


def check_unchanged(path: str, before: FileStat, now: FileStat) -> None:
    if now != before:
        raise AssetError(path, "it was changed during the run", hint="run this again")


@contextlib.contextmanager
def opened(path: str) -> Iterator[tuple[BufferedReader, FileStat]]:
    stat_file(path)
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            yield file, FileStat(status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: str, error: OSError | ValueError) -> AssetError:
    """Return the AssetError. ValueError comes from impossible file names, such as those with a NUL."""
    if isinstance(error, FileNotFoundError):
        return AssetError(path, "there is no such file")
    return AssetError(path, f"it cannot be read: {getattr(error, 'strerror', None) or error}")


class Sink(Protocol):
    """A sequence of bytes, possibly in several parts of memory: `views` in order, `nbytes` bytes in total."""

    def views(self, offset: int, nbytes: int) -> list[memoryview]: ...


def write_array(sink: Sink, offset: int, array: np.ndarray[Any, Any]) -> None:
    """Write the bytes of a dense array. Uses numpy for the copy, because it releases the GIL."""
    content = array.reshape(-1).view(np.uint8)
    done = 0
    for view in sink.views(offset, array.nbytes):
        np.copyto(np.frombuffer(view, np.uint8), content[done : done + view.nbytes])
        done += view.nbytes


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """One array: its numpy type such as `f4`; `offset` in bytes; `strides` in items, one per dimension."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """All arrays of one scene or of one frame."""

    fields: tuple[Field, ...]
    nbytes: int

    def shifted(self, offset: int) -> "Layout":
        """Return the layout with `offset` added to the offset of each field."""
        fields = (msgspec.structs.replace(field, offset=field.offset + offset) for field in self.fields)
        return Layout(fields=tuple(fields), nbytes=self.nbytes)


def aligned(nbytes: int) -> int:
    """Round up to 16 bytes."""
    return -(-nbytes // 16) * 16


def packed(arrays: Iterable[tuple[str, str, tuple[int, ...], int]]) -> Layout:
    """Return the layout of dense arrays one after the other, each given as (name, dtype, shape, item size)."""
    fields, end = [], 0
    for name, dtype, shape, itemsize in arrays:
        strides, count = [], 1
        for length in reversed(shape):
            strides.append(count)
            count *= length
        fields.append(Field(name=name, dtype=dtype, shape=shape, offset=end, strides=tuple(reversed(strides))))
        end = aligned(end + count * itemsize)
    return Layout(fields=tuple(fields), nbytes=end)


class Arrays(Mapping[str, Any]):
    """Views into one buffer: numpy arrays on the host, tensors on CUDA. Valid until the renderer returns."""

    def __init__(self, memory: DeviceMemory, buffer: Buffer, layout: Layout, path: str) -> None:
        self._memory, self._buffer = memory, buffer
        self._fields = {field.name: field for field in layout.fields}
        # A renderer asks for the same columns for every picture, while other threads wait for the interpreter.
        self._joined: dict[tuple[str, ...], Field] = {}
        self.path = path

    def __getitem__(self, name: str) -> Any:
        return self._view(self._fields[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def columns(self, *names: str) -> Any:
        """Return adjacent arrays of equal length and type as one array of shape (rows, names), without a copy. Raises
        KeyError if one is missing, ValueError if they are not adjacent in the asset."""
        if names not in self._joined:
            fields = [self._fields[name] for name in names]
            first, itemsize = fields[0], int(fields[0].dtype[1:])
            adjacent = [
                msgspec.structs.replace(first, name=name, offset=first.offset + place * itemsize)
                for place, name in enumerate(names)
            ]
            if len(first.shape) != 1 or fields != adjacent:
                raise ValueError(f"{', '.join(names)} are not adjacent in {self.path}")
            shape, strides = (first.shape[0], len(names)), (first.strides[0], 1)
            self._joined[names] = msgspec.structs.replace(first, shape=shape, strides=strides)
        return self._view(self._joined[names])

    def _view(self, field: Field) -> Any:
        return self._memory.view(
            self._buffer, dtype=field.dtype, shape=field.shape, offset=field.offset, strides=field.strides
        )

    def __repr__(self) -> str:
        return f"<Arrays of {self.path}: {', '.join(self._fields)}>"
