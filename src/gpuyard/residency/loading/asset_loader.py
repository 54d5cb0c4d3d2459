"""Assets on disk: how large they are before they are read, and reading them into memory that somebody else has.

A scene is one file. An actor is a sequence of frames, a file each: those of a folder, those that a pattern matches, or
one; in natural order, so that `f2` is before `f10`. Files are PLY, or whatever a user's own loader makes arrays of.
The size of PLY is exact, from headers alone; a loader's is estimated by the sizes of the files. Whatever is wrong with
a file is an AssetError that names it.
"""

import glob
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from gpuyard.core.natural_order import natural_order
from gpuyard.errors import AssetError
from gpuyard.residency.loading.asset_files import check_unchanged, look_at, unreadable
from gpuyard.residency.loading.ply_file import Ply, describe
from gpuyard.residency.loading.write_target import Sink, put
from gpuyard.residency.planning.array_layout import Field, Layout, aligned, packed

__all__ = ["Load", "Loader", "Sink", "Source"]

HELD_NBYTES = 1 << 28  # of a loader's arrays beside the sink, until it is known how large the sink must be

Load = Callable[[str], Mapping[str, npt.ArrayLike]]
Allocate = Callable[[int], Sink]
Named = dict[str, npt.NDArray[Any]]

_DTYPES = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"}


class Source(Protocol):
    """One asset on disk, as it was when it was first looked at. Several threads may read it at once."""

    @property
    def nbytes(self) -> int:
        """In memory, all frames together."""

    @property
    def is_exact(self) -> bool:
        """Whether `nbytes` and `frame_nbytes` are what reading gives, and no estimate."""

    @property
    def frame_nbytes(self) -> int:
        """The largest frame's; a scene is one."""

    @property
    def frames(self) -> int: ...

    @property
    def disk_nbytes(self) -> int: ...

    def read(self, allocate: Allocate) -> tuple[Layout, ...]:
        """All frames, one after the other, into the one sink that is asked for.

        A layout per frame: its offsets count from the sink's beginning, its `nbytes` are that frame's alone.
        """
        ...

    def read_frame(self, index: int, allocate: Allocate) -> Layout:
        """One frame alone, in a sink of its own."""
        ...


class Loader:
    """Opens assets. `load` gives the arrays of one file by name; without it, files are PLY."""

    def __init__(self, load: Load | None = None) -> None:
        self._load = load

    def scene(self, path: str) -> Source:
        return self._source([path])

    def actor(self, path: str) -> Source:
        """Its frames in natural order."""
        try:
            frames = _frames(path, "" if self._load else ".ply")
        except (OSError, ValueError) as error:
            raise unreadable(path, error) from error
        if not frames:
            raise AssetError(path, "it has no frames", hint=None if self._load else "frames are files called *.ply")
        return self._source(sorted(frames, key=natural_order))

    def _source(self, paths: Sequence[str]) -> Source:
        if self._load is None:
            return _PlySource([describe(path) for path in paths])
        return _LoadedSource(self._load, paths)


def _frames(path: str, suffix: str) -> list[str]:
    if os.path.isdir(path):
        with os.scandir(path) as entries:
            files = [entry for entry in entries if entry.is_file() and not entry.name.startswith(".")]
        return [entry.path for entry in files if entry.name.lower().endswith(suffix)]
    if os.path.lexists(path) or not glob.has_magic(path):
        return [path]
    return [found for found in glob.glob(path, recursive=True) if os.path.isfile(found)]


class _PlySource:
    is_exact = True

    def __init__(self, files: Sequence[Ply]) -> None:
        self._files = files
        self._sizes = [file.nbytes for file in files]
        self.nbytes = sum(self._sizes)
        self.frame_nbytes = max(self._sizes)
        self.frames = len(files)
        self.disk_nbytes = sum(file.look.nbytes for file in files)

    def read(self, allocate: Allocate) -> tuple[Layout, ...]:
        sink = allocate(self.nbytes)
        placed = list(zip(self._files, _offsets(self._sizes), strict=True))
        for file, offset in placed:
            file.read(sink, offset)
        return tuple(file.layout(offset) for file, offset in placed)

    def read_frame(self, index: int, allocate: Allocate) -> Layout:
        file = self._files[index]
        file.read(allocate(self._sizes[index]))
        return file.layout()


class _LoadedSource:
    is_exact = False

    def __init__(self, load: Load, paths: Sequence[str]) -> None:
        self._load, self._paths = load, paths
        self._looks = {path: look_at(path) for path in paths}
        sizes = [aligned(look.nbytes) for look in self._looks.values()]
        self.nbytes = sum(sizes)
        self.frame_nbytes = max(sizes)
        self.frames = len(paths)
        self.disk_nbytes = sum(look.nbytes for look in self._looks.values())

    def read(self, allocate: Allocate) -> tuple[Layout, ...]:
        """A sequence that is too large to be held beside the sink is loaded twice: for its size, then for its data."""
        held: dict[str, Named] = {}
        layouts: list[Layout] = []
        total = 0
        for path in self._paths:
            arrays = self._arrays(path)
            layouts.append(_layout_of(arrays))
            total += layouts[-1].nbytes
            if total <= HELD_NBYTES or self.frames == 1:
                held[path] = arrays
        offsets = _offsets(layout.nbytes for layout in layouts)
        sink = allocate(total)
        for path, layout, offset in zip(self._paths, layouts, offsets, strict=True):
            arrays = held.pop(path) if path in held else self._arrays(path)
            if _layout_of(arrays) != layout:
                raise AssetError(path, "its loader gave other arrays when it was asked again")
            _put_all(sink, offset, arrays, layout)
        return tuple(_moved(layout, offset) for layout, offset in zip(layouts, offsets, strict=True))

    def read_frame(self, index: int, allocate: Allocate) -> Layout:
        arrays = self._arrays(self._paths[index])
        layout = _layout_of(arrays)
        _put_all(allocate(layout.nbytes), 0, arrays, layout)
        return layout

    def _arrays(self, path: str) -> Named:
        check_unchanged(path, self._looks[path], look_at(path))
        try:
            given = self._load(path)
            arrays = {name: np.asarray(value) for name, value in given.items()} if isinstance(given, Mapping) else None
        except (Exception, SystemExit) as error:  # another's code: whatever it raises concerns this file alone
            raise AssetError(path, f"its loader failed: {type(error).__name__}: {error}") from error
        if arrays is None:
            raise AssetError(path, f"its loader gave a {type(given).__name__}, and no mapping of names to arrays")
        return _checked(path, arrays)


def _checked(path: str, arrays: Named) -> Named:
    """Dense, and in this machine's byte order."""
    for name, array in arrays.items():
        if not isinstance(name, str):
            raise AssetError(path, f"its loader gave an array the name {name!r}, which is no string")
        if array.dtype.str[1:] not in _DTYPES:
            raise AssetError(
                path, f"its loader gave {name!r} as an array of {array.dtype}, which is no type of numbers"
            )
    if not any(array.nbytes for array in arrays.values()):
        raise AssetError(path, "its loader gave no values")
    return {name: _dense(array) for name, array in arrays.items()}


def _dense(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.require(array, array.dtype.newbyteorder("="), ["C"])


def _layout_of(arrays: Named) -> Layout:
    return packed((name, array.dtype.str[1:], array.shape, array.itemsize) for name, array in arrays.items())


def _put_all(sink: Sink, offset: int, arrays: Named, layout: Layout) -> None:
    for field in layout.fields:
        if arrays[field.name].size:
            put(sink, offset + field.offset, arrays[field.name])


def _offsets(sizes: Iterable[int]) -> list[int]:
    return list(accumulate(sizes, initial=0))[:-1]


def _moved(layout: Layout, offset: int) -> Layout:
    def moved(field: Field) -> Field:
        return msgspec.structs.replace(field, offset=field.offset + offset)

    return Layout(fields=tuple(map(moved, layout.fields)), nbytes=layout.nbytes)
