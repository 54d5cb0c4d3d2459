"""Read the vertices of PLY files directly into their target memory: binary of either byte order, or text.

A property becomes a column of that name. Adjacent properties of one type stay adjacent, as the rows of one block: a
file with a single type, in this machine's byte order, is one block already and is read without a copy. Other files are
decoded in chunks of bounded size. Elements before the vertices are skipped, elements after them are ignored. The
vertices must be a table of numbers, one row each. Every mistake in a file is an AssetError, and so is a file that has
changed since it was described.
"""

import enum
import functools
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from io import BufferedReader
from itertools import groupby
from typing import Any, BinaryIO

import msgspec
import numpy as np

from gpuyard.errors import AssetError
from gpuyard.recipes.render.memory.named_arrays import (
    Field,
    FileStat,
    Layout,
    Sink,
    aligned,
    check_unchanged,
    opened,
    write_array,
)

Numbers = np.ndarray[Any, np.dtype[np.float64]]


def parse_rows(path: str, lines: list[str], first: int, columns: int) -> Numbers:
    """Return all numbers as float64, which holds the numbers of every PLY type exactly."""
    try:
        if not lines[0].strip():
            raise ValueError("a line is blank")  # numpy skips blank lines, and warns if all are blank
        table = np.loadtxt(lines, np.float64, comments=None, ndmin=2)
        if table.shape != (len(lines), columns):
            raise ValueError(f"{len(lines)} lines are {table.shape[0]} rows of {table.shape[1]} numbers")
    except ValueError as error:
        raise AssetError(path, _find_mistake(lines, first, columns) or str(error)) from error
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


def as_type(path: str, values: Numbers, dtype: str, names: Sequence[str], first: int) -> np.ndarray[Any, Any]:
    """Return the values as `dtype`. Raises AssetError if an integer does not fit. `first`: rows before these."""
    with np.errstate(all="ignore"):
        if dtype[0] == "f":
            return np.ascontiguousarray(values, dtype)
        bounds = np.iinfo(dtype)
        fits = (values >= bounds.min) & (values <= bounds.max) & (values == np.trunc(values))
        if fits.all():
            return np.ascontiguousarray(values, dtype)
    row, column = np.argwhere(~fits)[0]
    raise AssetError(
        path,
        f"vertex {first + row + 1:,} has {values[row, column]:.15g} as its {names[column]!r}, "
        f"which must be an integer from {bounds.min:,} to {bounds.max:,}",
    )


HEADER_LIMIT = 1 << 20  # bytes to read, because a file may not be PLY at all
PART_NBYTES = 1 << 26  # of a file that several threads read at once
CHUNK_NBYTES = 1 << 20  # fits into a processor's cache: with 16 MB, decoding took up to a third longer
TEXT_NBYTES = 1 << 16  # numpy holds the GIL while it parses: about a millisecond for this
LINE_LIMIT = 1 << 22
_MOST_LISTS = 1_000_000  # each is passed over by itself, in 3 us

_TYPES = {
    "char": "i1", "uchar": "u1", "short": "i2", "ushort": "u2",
    "int": "i4", "uint": "u4", "float": "f4", "double": "f8",
}  # fmt: skip
_TYPES |= {np.dtype(dtype).name: dtype for dtype in _TYPES.values()}  # int8, uint8 and so on
_COUNT = re.compile(r"[0-9]{1,18}")  # no file has more rows than that


class PlyFormat(enum.StrEnum):
    ASCII = "ascii"
    LITTLE = "binary_little_endian"
    BIG = "binary_big_endian"


_NATIVE = PlyFormat.LITTLE if sys.byteorder == "little" else PlyFormat.BIG


class Property(msgspec.Struct, frozen=True, kw_only=True):
    """A column: its numpy type without the byte order. A list has a type for its length, too."""

    name: str
    dtype: str
    length_dtype: str | None = None

    @property
    def least_nbytes(self) -> int:
        """Minimum size in a row of a binary file; exact unless it is a list."""
        return int((self.length_dtype or self.dtype)[1:])


class PlyElement(msgspec.Struct):
    """A table: its columns and its number of rows."""

    name: str
    rows: int
    properties: list[Property] = []

    @property
    def has_lists(self) -> bool:
        return any(column.length_dtype for column in self.properties)

    @property
    def row_nbytes(self) -> int:
        """Size of a row in a binary file; the minimum if there are lists."""
        return sum(column.least_nbytes for column in self.properties)


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The vertices, the elements before them, and the size of the header."""

    form: PlyFormat
    before: tuple[PlyElement, ...]
    vertex: PlyElement
    nbytes: int

    @property
    def least_data_nbytes(self) -> int:
        """Minimum size of the data. In text, a number and its separator are two bytes; the last separator may lack."""
        elements = (*self.before, self.vertex)
        if self.form is PlyFormat.ASCII:
            return sum(element.rows * max(1, 2 * len(element.properties)) for element in elements) - 1
        return sum(element.rows * element.row_nbytes for element in elements)


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
        fields: list[Field] = []
        for block in self.blocks:
            shape, strides, itemsize = (self.rows,), (len(block.names),), int(block.dtype[1:])
            for place, name in enumerate(block.names):
                at = offset + block.offset + place * itemsize
                fields.append(Field(name=name, dtype=block.dtype, shape=shape, offset=at, strides=strides))
        return Layout(fields=tuple(fields), nbytes=self.nbytes)

    def read(self, sink: Sink, offset: int = 0) -> None:
        """Read all vertices into the sink, from `offset` on."""
        for part in self.parts():
            self.read_part(part, sink, offset)

    def parts(self) -> list[range]:
        """Return the rows in parts of at most PART_NBYTES, which threads can read at once; all in one part if the rows
        are decoded, or have no known place in the file."""
        is_one = not self.is_plain or any(element.has_lists for element in self.header.before)
        step = self.rows if is_one else max(1, PART_NBYTES // self.header.vertex.row_nbytes)
        return [range(first, min(first + step, self.rows)) for first in range(0, self.rows, step)]

    @property
    def is_plain(self) -> bool:
        """Whether the vertices are in memory as in the file: they are read without a copy."""
        header, blocks = self.header, self.blocks
        is_same = header.form is _NATIVE or blocks[0].dtype[1:] == "1"
        return header.form is not PlyFormat.ASCII and len(blocks) == 1 and is_same

    def read_part(self, rows: range, sink: Sink, offset: int = 0) -> None:
        """Read these vertices into the sink; `offset` is that of the first vertex of the file."""
        with opened(self.path) as (file, now):
            check_unchanged(self.path, self.stat, now)
            _PlyReader(self, file, sink, offset).run(rows)


def describe(path: str) -> Ply:
    """Read the header. Raises AssetError if the file is too short for it."""
    with opened(path) as (file, stat):
        header = _read_header(file, path)
    data_nbytes = stat.nbytes - header.nbytes
    if data_nbytes < header.least_data_nbytes:
        raise AssetError(
            path,
            f"its header says {header.vertex.rows:,} vertices, which need at least {header.least_data_nbytes:,} bytes "
            f"of data, but it has {data_nbytes:,}",
            hint="it is truncated, or its header is wrong",
        )
    return Ply(path=path, stat=stat, header=header)


def _read_header(file: BinaryIO, path: str) -> Header:
    """Read the header from the start of a file, and leave the file at the end of the header."""
    form = None
    elements: list[PlyElement] = []
    for words in _header_lines(file, path):
        match words:
            case [] | ["comment" | "obj_info", *_]:
                pass
            case ["format", name, "1.0"] if name in list(PlyFormat):
                form = PlyFormat(name)
            case ["element", name, rows]:
                if not _COUNT.fullmatch(rows):
                    raise AssetError(path, f"its header says that element {_shown(name)} has {_shown(rows)} rows")
                elements.append(PlyElement(name, int(rows)))
            case ["property", *definition] if elements:
                column = _column(*definition)
                if column is None:
                    shown = _shown(" ".join(definition))
                    raise AssetError(path, f"its header has a property of no known type: {shown}")
                elements[-1].properties.append(column)
            case _:
                raise AssetError(path, f"its header has a line that cannot be understood: {_shown(' '.join(words))}")
    if form is None:
        raise AssetError(path, "its header has no format")
    return _find_vertices(path, form, elements, file.tell())


def _header_lines(file: BinaryIO, path: str) -> Iterator[list[str]]:
    """Yield the words of each line between the first and the last."""
    first = file.readline(len(b"ply\r\n"))
    if not first:
        raise AssetError(path, "it is empty")
    if first.rstrip() != b"ply" or not first.endswith(b"\n"):
        raise AssetError(path, "it is not a PLY file", hint="other formats need your own loader (--loader)")
    left = HEADER_LIMIT
    while (line := file.readline(left)).endswith(b"\n"):
        left -= len(line)
        words = line.decode("utf-8", "replace").split()
        if words == ["end_header"]:
            return
        yield words
    where = "within 1 MB" if len(line) == left else "before the file does"
    raise AssetError(path, f"its header does not end {where}")


@functools.lru_cache(4096)  # thousands of frames have the same few columns
def _column(*definition: str) -> Property | None:
    match definition:
        case ("list", length, item, name) if length in _TYPES and item in _TYPES and _TYPES[length][0] != "f":
            return Property(name=name, dtype=_TYPES[item], length_dtype=_TYPES[length])
        case (kind, name) if kind in _TYPES:
            return Property(name=name, dtype=_TYPES[kind])
        case _:
            return None


def _find_vertices(path: str, form: PlyFormat, elements: list[PlyElement], nbytes: int) -> Header:
    names = [element.name for element in elements]
    if "vertex" not in names:
        raise AssetError(path, "it has no element called vertex")
    place = names.index("vertex")
    vertex = elements[place]
    columns = Counter(column.name for column in vertex.properties)
    lists = 0 if form is PlyFormat.ASCII else sum(element.rows for element in elements[:place] if element.has_lists)
    twice = next((name for name, times in columns.items() if times > 1), None)
    problem = (
        (not vertex.rows and "it has no vertices")
        or (not columns and "its vertices have no properties")
        or (vertex.has_lists and "its vertices have properties that are lists, which is not supported")
        or (lists > _MOST_LISTS and f"it has {lists:,} rows with lists before its vertices, more than {_MOST_LISTS:,}")
        or (twice is not None and f"its vertices have two properties called {_shown(twice)}")
    )
    if problem:
        raise AssetError(path, problem)
    return Header(form=form, before=tuple(elements[:place]), vertex=vertex, nbytes=nbytes)


def _shown(words: str) -> str:
    return repr(words if len(words) <= 60 else words[:60] + "…")


class _PlyReader:
    def __init__(self, ply: Ply, file: BufferedReader, sink: Sink, offset: int) -> None:
        self._ply, self._path = ply, ply.path
        self._file, self._sink, self._offset = file, sink, offset
        self._is_swapped = ply.header.form is not _NATIVE

    def run(self, part: range) -> None:
        header, blocks = self._ply.header, self._ply.blocks
        self._file.seek(header.nbytes)
        if header.form is PlyFormat.ASCII:
            self._read_text(blocks)
            return
        for element in header.before:
            if not element.has_lists:
                self._file.seek(element.rows * element.row_nbytes, os.SEEK_CUR)
                continue
            for _ in range(element.rows):
                self._skip_row(element)
        if self._ply.is_plain:
            row_nbytes = header.vertex.row_nbytes
            self._file.seek(part.start * row_nbytes, os.SEEK_CUR)
            for view in self._sink.views(self._offset + part.start * row_nbytes, len(part) * row_nbytes):
                self._fill(view)
        else:
            self._read_chunks(blocks)

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
            table = parse_rows(self._path, lines, done, len(self._ply.header.vertex.properties))
            for block in blocks:
                values = table[:, block.column : block.column + len(block.names)]
                offset = self._offset + block.offset + done * block.row_nbytes
                write_array(self._sink, offset, as_type(self._path, values, block.dtype, block.names, done))
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
