"""Read assets from disk into memory of the caller, and tell their sizes before that. A scene is one file. An actor is a
sequence of frames, one file each, in natural order: of a folder, of a glob, or a single file. Files are PLY, or a
format that the user's loader turns into arrays: then sizes are estimated by the size of the files."""

import abc
import glob
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuyard.errors import AssetError
from gpuyard.model.printable_text import natural_order
from gpuyard.recipes.render.memory.device_memory import NUMBER_TYPES
from gpuyard.recipes.render.memory.named_arrays import (
    Layout,
    Sink,
    aligned,
    check_unchanged,
    packed,
    stat_file,
    unreadable,
    write_array,
)
from gpuyard.recipes.render.memory.ply_file import Ply, describe

HELD_NBYTES = 1 << 28  # limit of a loader's arrays kept until the size of the whole asset is known

Load = Callable[[str], Mapping[str, npt.ArrayLike]]
Allocate = Callable[[int], Sink]
Spread = Callable[[Sequence[Callable[[], object]]], object]  # calls all of them, in any threads, and waits for that
NamedArrays = dict[str, npt.NDArray[Any]]


def call_in_turn(acts: Iterable[Callable[[], object]]) -> None:
    for act in acts:
        act()


class Source(abc.ABC):
    """One asset on disk, as first inspected. Several threads may read it at once. `nbytes` is the size of all frames in
    memory, `frame_nbytes` that of the largest; a scene is one frame. `is_exact`: both are not estimates."""

    is_exact: bool

    def __init__(self, sizes: Sequence[int], disk_nbytes: int) -> None:
        self.nbytes, self.frame_nbytes, self.frames = sum(sizes), max(sizes), len(sizes)
        self.disk_nbytes = disk_nbytes

    @abc.abstractmethod
    def read(self, allocate: Allocate, spread: Spread = call_in_turn) -> tuple[Layout, ...]:
        """Read all frames into one sink from `allocate`, in parts that `spread` calls. Return a layout per frame:
        offsets count from the start of the sink, `nbytes` is the size of that frame."""

    @abc.abstractmethod
    def read_frame(self, index: int, allocate: Allocate) -> Layout:
        """Read one frame into a sink from `allocate`."""


class Loader:
    """Opens assets. `load` returns the arrays of one file by name; without it, files are PLY."""

    def __init__(self, load: Load | None = None) -> None:
        self._load = load

    def scene(self, path: str) -> Source:
        return self._source([path])

    def actor(self, path: str) -> Source:
        """Return the frames in natural order."""
        try:
            frames = _find_frames(path, "" if self._load else ".ply")
        except (OSError, ValueError) as error:
            raise unreadable(path, error) from error
        if not frames:
            raise AssetError(path, "it has no frames", hint=None if self._load else "frames are files called *.ply")
        return self._source(sorted(frames, key=natural_order))

    def _source(self, paths: Sequence[str]) -> Source:
        return _PlySource(list(map(describe, paths))) if self._load is None else _LoadedSource(self._load, paths)


def _find_frames(path: str, suffix: str) -> list[str]:
    if os.path.isdir(path):
        with os.scandir(path) as entries:
            files = [entry for entry in entries if entry.is_file() and not entry.name.startswith(".")]
        return [entry.path for entry in files if entry.name.lower().endswith(suffix)]
    if os.path.lexists(path) or not glob.has_magic(path):
        return [path]
    pattern = Path(path, "*") if path.endswith("**") else Path(path)
    found = Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))  # `**` follows no links to folders
    files_found = [each for each in found if each.is_file()]
    hidden = {each for each in files_found for name in {*each.parts} - {*pattern.parts} if name.startswith(".")}
    return [str(each) for each in files_found if each not in hidden]


class _PlySource(Source):
    is_exact = True

    def __init__(self, files: Sequence[Ply]) -> None:
        self._files = files
        self._sizes = [file.nbytes for file in files]
        super().__init__(self._sizes, sum(file.stat.nbytes for file in files))

    def read(self, allocate: Allocate, spread: Spread = call_in_turn) -> tuple[Layout, ...]:
        sink = allocate(self.nbytes)
        placed = list(zip(self._files, _offsets(self._sizes), strict=True))
        spread([partial(file.read_part, part, sink, offset) for file, offset in placed for part in file.parts()])
        return tuple(file.layout(offset) for file, offset in placed)

    def read_frame(self, index: int, allocate: Allocate) -> Layout:
        file = self._files[index]
        file.read(allocate(self._sizes[index]))
        return file.layout()


class _LoadedSource(Source):
    is_exact = False

    def __init__(self, load: Load, paths: Sequence[str]) -> None:
        self._load, self._paths = load, paths
        self._stats = {path: stat_file(path) for path in paths}
        sizes = [stat.nbytes for stat in self._stats.values()]
        super().__init__([aligned(nbytes) for nbytes in sizes], sum(sizes))

    def read(self, allocate: Allocate, spread: Spread = call_in_turn) -> tuple[Layout, ...]:  # noqa: ARG002
        """A sequence larger than HELD_NBYTES is loaded twice: once for its size, then for its data."""
        held: dict[str, NamedArrays] = {}
        layouts: list[Layout] = []
        total = 0
        for path in self._paths:
            arrays = self._load_arrays(path)
            layouts.append(_layout_of(arrays))
            total += layouts[-1].nbytes
            if total <= HELD_NBYTES or self.frames == 1:
                held[path] = arrays
        offsets = _offsets(layout.nbytes for layout in layouts)
        sink = allocate(total)
        for path, layout, offset in zip(self._paths, layouts, offsets, strict=True):
            arrays = held.pop(path) if path in held else self._load_arrays(path)
            if _layout_of(arrays) != layout:
                raise AssetError(path, "its loader returned different arrays on the second call")
            _write_arrays(sink, offset, arrays, layout)
        return tuple(layout.shifted(offset) for layout, offset in zip(layouts, offsets, strict=True))

    def read_frame(self, index: int, allocate: Allocate) -> Layout:
        arrays = self._load_arrays(self._paths[index])
        layout = _layout_of(arrays)
        _write_arrays(allocate(layout.nbytes), 0, arrays, layout)
        return layout

    def _load_arrays(self, path: str) -> NamedArrays:
        """Return the arrays dense and in this machine's byte order."""
        check_unchanged(path, self._stats[path], stat_file(path))
        try:
            given = self._load(path)
            arrays = {name: np.asarray(value) for name, value in given.items()} if isinstance(given, Mapping) else None
        except (Exception, SystemExit) as error:  # the user's loader may raise anything, and only this file fails
            raise AssetError(path, f"its loader failed: {type(error).__name__}: {error}") from error
        if arrays is None:
            raise AssetError(path, f"its loader returned a {type(given).__name__}, not a mapping of names to arrays")
        for name, array in arrays.items():
            if not isinstance(name, str):
                raise AssetError(path, f"its loader returned an array named {name!r}, which is not a string")
            if array.dtype.str[1:] not in NUMBER_TYPES:
                what = f"{name!r} as an array of {array.dtype}, which is not a number type"
                raise AssetError(path, f"its loader returned {what}")
        if not any(array.nbytes for array in arrays.values()):
            raise AssetError(path, "its loader returned no values")
        return {name: np.require(array, array.dtype.newbyteorder("="), ["C"]) for name, array in arrays.items()}


def _layout_of(arrays: NamedArrays) -> Layout:
    return packed((name, array.dtype.str[1:], array.shape, array.itemsize) for name, array in arrays.items())


def _write_arrays(sink: Sink, offset: int, arrays: NamedArrays, layout: Layout) -> None:
    for field in layout.fields:
        if arrays[field.name].size:
            write_array(sink, offset + field.offset, arrays[field.name])


def _offsets(sizes: Iterable[int]) -> list[int]:
    return list(accumulate(sizes, initial=0))[:-1]
