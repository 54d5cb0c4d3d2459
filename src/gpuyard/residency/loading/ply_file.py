"""Read the vertices of PLY files directly into their target memory: binary of either byte order, or text.

A property becomes a column of that name. Adjacent properties of one type stay adjacent, as the rows of one block: a
file with a single type, in this machine's byte order, is one block already and is read without a copy. Other files are
decoded in chunks of bounded size. Elements before the vertices are skipped, elements after them are ignored. Every
mistake in a file is an AssetError, and so is a file that has changed since it was described.
"""

import os
import sys
from collections.abc import Iterator
from io import BufferedReader
from itertools import groupby
from typing import Any

import msgspec
import numpy as np

from gpuyard.errors import AssetError
from gpuyard.residency.loading.asset_files import FileStat, check_unchanged, opened
from gpuyard.residency.loading.ply_header import Header, PlyElement, PlyFormat, read_header
from gpuyard.residency.loading.write_target import Sink, write_array
from gpuyard.residency.planning.array_layout import Field, Layout, aligned

CHUNK_NBYTES = 1 << 20  # fits into a processor's cache: with 16 MB, decoding took up to a third longer
TEXT_NBYTES = 1 << 16  # numpy holds the GIL while it parses: about a millisecond for this
LINE_LIMIT = 1 << 22

Numbers = np.ndarray[Any, np.dtype[np.float64]]

_NATIVE = PlyFormat.LITTLE if sys.byteorder == "little" else PlyFormat.BIG


class VertexBlock(msgspec.Struct, frozen=True, kw_only=True):
    """Adjacent columns of one type: their names, their place in a row of the file, and their offset in the asset."""

    names: tuple[str, ...]
    dtype: str
    column: int
    in_row: int
    offset: int

    @property
    def row_nbytes(self) -> int:
        return len(self.names) * int(self.dtype[1:])


class Ply(msgspec.Struct, frozen=True, kw_only=True):
    """A described file: only its header was read."""

    path: str
    stat: FileStat
    header: Header

    @property
    def rows(self) -> int:
        return self.header.vertex.rows

    @property
    def blocks(self) -> list[VertexBlock]:
        blocks: list[VertexBlock] = []
        column = in_row = offset = 0
        for dtype, columns in groupby(self.header.vertex.properties, key=lambda column: column.dtype):
            names = tuple(one.name for one in columns)
            blocks.append(VertexBlock(names=names, dtype=dtype, column=column, in_row=in_row, offset=offset))
            column, in_row = column + len(names), in_row + blocks[-1].row_nbytes
            offset = aligned(offset + self.rows * blocks[-1].row_nbytes)
        return blocks

    @property
    def nbytes(self) -> int:
        last = self.blocks[-1]
        return aligned(last.offset + self.rows * last.row_nbytes)

    def layout(self, offset: int = 0) -> Layout:
        """Return the layout of the vertices in memory that starts at `offset`."""
        fields = [
            Field(
                name=name,
                dtype=block.dtype,
                shape=(self.rows,),
                offset=offset + block.offset + place * int(block.dtype[1:]),
                strides=(len(block.names),),
            )
            for block in self.blocks
            for place, name in enumerate(block.names)
        ]
        return Layout(fields=tuple(fields), nbytes=self.nbytes)

    def read(self, sink: Sink, offset: int = 0) -> None:
        """Read all vertices into the sink, from `offset` on."""
        with opened(self.path) as (file, now):
            check_unchanged(self.path, self.stat, now)
            _PlyReader(self, file, sink, offset).run()


def describe(path: str) -> Ply:
    """Read the header. Raises AssetError if the file is too short for it."""
    with opened(path) as (file, stat):
        header = read_header(file, path)
    data_nbytes = stat.nbytes - header.nbytes
    if data_nbytes < header.least_data_nbytes:
        raise AssetError(
            path,
            f"its header says {header.vertex.rows:,} vertices, which need at least {header.least_data_nbytes:,} bytes "
            f"of data, but it has {data_nbytes:,}",
            hint="it is truncated, or its header is wrong",
        )
    return Ply(path=path, stat=stat, header=header)


class _PlyReader:
    """Reads one file into a sink."""

    def __init__(self, ply: Ply, file: BufferedReader, sink: Sink, offset: int) -> None:
        self._ply = ply
        self._path = ply.path
        self._file = file
        self._sink = sink
        self._offset = offset
        self._is_swapped = ply.header.form is not _NATIVE

    def run(self) -> None:
        header, blocks = self._ply.header, self._ply.blocks
        self._file.seek(header.nbytes)
        if header.form is PlyFormat.ASCII:
            self._read_text(blocks)
            return
        for element in header.before:
            self._skip_element(element)
        if len(blocks) == 1 and (not self._is_swapped or blocks[0].dtype[1:] == "1"):
            self._read_rows()
        else:
            self._read_chunks(blocks)

    def _skip_element(self, element: PlyElement) -> None:
        if not element.has_lists:
            self._file.seek(element.rows * element.row_nbytes, os.SEEK_CUR)
            return
        for _ in range(element.rows):
            self._skip_row(element)

    def _skip_row(self, element: PlyElement) -> None:
        to_skip = 0
        for column in element.properties:
            to_skip += column.least_nbytes
            if column.length_dtype:
                self._file.seek(to_skip - column.least_nbytes, os.SEEK_CUR)
                to_skip = self._list_length(element, column.length_dtype) * int(column.dtype[1:])
        self._file.seek(to_skip, os.SEEK_CUR)

    def _list_length(self, element: PlyElement, dtype: str) -> int:
        raw = bytearray(int(dtype[1:]))
        self._fill(memoryview(raw))
        is_big = self._ply.header.form is PlyFormat.BIG
        length = int.from_bytes(raw, "big" if is_big else "little", signed=dtype[0] == "i")
        if length < 0:
            raise AssetError(self._path, f"a list in its element {element.name!r} has {length} items")
        return length

    def _read_rows(self) -> None:
        for view in self._sink.views(self._offset, self._ply.rows * self._ply.header.vertex.row_nbytes):
            self._fill(view)

    def _read_chunks(self, blocks: list[VertexBlock]) -> None:
        row_nbytes = self._ply.header.vertex.row_nbytes
        step = max(1, CHUNK_NBYTES // row_nbytes)
        chunk = bytearray(min(step, self._ply.rows) * row_nbytes)
        for first in range(0, self._ply.rows, step):
            count = min(step, self._ply.rows - first)
            self._fill(memoryview(chunk)[: count * row_nbytes])
            for block in blocks:
                # One void item per row: numpy copies it at once, and columns item by item.
                rows = np.ndarray((count,), f"V{block.row_nbytes}", chunk, block.in_row, (row_nbytes,))
                self._write_rows(block, first, rows)

    def _fill(self, view: memoryview) -> None:
        if self._file.readinto(view) != view.nbytes:
            raise AssetError(self._path, "it ends before its last vertex", hint="it is truncated")

    def _write_rows(self, block: VertexBlock, first: int, rows: np.ndarray[Any, Any]) -> None:
        offset = self._offset + block.offset + first * block.row_nbytes
        views = self._sink.views(offset, rows.nbytes)
        target = np.frombuffer(views[0], rows.dtype) if len(views) == 1 else np.empty_like(rows)
        np.copyto(target, rows)
        if self._is_swapped:
            target.view(block.dtype).byteswap(inplace=True)
        if len(views) > 1:
            write_array(self._sink, offset, target)

    def _read_text(self, blocks: list[VertexBlock]) -> None:
        done, rows = 0, self._ply.rows
        for lines in self._vertex_lines():
            table = _parse(self._path, lines, done, len(self._ply.header.vertex.properties))
            for block in blocks:
                values = table[:, block.column : block.column + len(block.names)]
                offset = self._offset + block.offset + done * block.row_nbytes
                write_array(self._sink, offset, _as_type(self._path, values, block, done))
            done += len(lines)
        if done < rows:
            raise AssetError(self._path, f"its header says {rows:,} vertices, but it has {done:,}")

    def _vertex_lines(self) -> Iterator[list[str]]:
        """Yield the lines of vertices. In text, a row of every element is a line."""
        before, left = sum(element.rows for element in self._ply.header.before), self._ply.rows
        for lines in self._lines():
            vertices = lines[before : before + left]
            before, left = max(0, before - len(lines)), left - len(vertices)
            if vertices:
                yield vertices
            if not left:
                return

    def _lines(self) -> Iterator[list[str]]:
        rest = b""
        while chunk := self._file.read(TEXT_NBYTES):
            whole, newline, rest = (rest + chunk).rpartition(b"\n")
            if newline:
                yield whole.replace(b"\r\n", b"\n").removesuffix(b"\r").decode("latin-1").split("\n")
            if len(rest) > LINE_LIMIT:
                raise AssetError(self._path, f"it has a line of more than {LINE_LIMIT:,} bytes")
        if rest:
            yield [rest.removesuffix(b"\r").decode("latin-1")]


def _parse(path: str, lines: list[str], first: int, columns: int) -> Numbers:
    try:
        return _parse_table(lines, columns)
    except ValueError as error:
        raise AssetError(path, _find_mistake(lines, first, columns) or str(error)) from error


def _parse_table(lines: list[str], columns: int) -> Numbers:
    """Return all numbers as float64, which holds the numbers of every PLY type exactly."""
    if not lines[0].strip():
        raise ValueError("a line is blank")  # numpy skips blank lines, and warns if all are blank
    table = np.loadtxt(lines, np.float64, comments=None, ndmin=2)
    if table.shape != (len(lines), columns):
        raise ValueError(f"{len(lines)} lines are {table.shape[0]} rows of {table.shape[1]} numbers")
    return table


def _find_mistake(lines: list[str], first: int, columns: int) -> str | None:
    for row, line in enumerate(lines, first + 1):
        numbers = line.split()
        if len(numbers) != columns:
            return f"vertex {row:,} has {len(numbers)} numbers, but the header says {columns}"
        for number in numbers:
            try:
                float(number)
            except ValueError:
                return f"vertex {row:,} has {number[:60]!r} in place of a number"
    return None


def _as_type(path: str, values: Numbers, block: VertexBlock, first: int) -> np.ndarray[Any, Any]:
    with np.errstate(all="ignore"):
        if block.dtype[0] != "f":
            _check_integers(path, values, block, first)
        return np.ascontiguousarray(values, block.dtype)


def _check_integers(path: str, values: Numbers, block: VertexBlock, first: int) -> None:
    bounds = np.iinfo(block.dtype)
    fits = (values >= bounds.min) & (values <= bounds.max) & (values == np.trunc(values))
    if fits.all():
        return
    row, column = np.argwhere(~fits)[0]
    raise AssetError(
        path,
        f"vertex {first + row + 1:,} has {values[row, column]:.15g} as its {block.names[column]!r}, "
        f"which must be an integer from {bounds.min:,} to {bounds.max:,}",
    )
