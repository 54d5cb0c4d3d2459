"""Read the vertices of PLY files directly into their target memory: binary of either byte order, or text.

Adjacent properties of one type stay adjacent, as the rows of one block: a file with a single type, in this machine's
byte order, is read without a copy. Other files are decoded in chunks of bounded size. Every mistake in a file is an
AssetError, and so is a file that has changed since it was described."""

import enum
import functools
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

PART_NBYTES = 1 << 26  # of a file that several threads read at once
CHUNK_NBYTES = 1 << 20  # fits into a processor's cache: with 16 MB, decoding took up to a third longer
LINE_LIMIT = 1 << 22

_TYPES = {
    "char": "i1", "uchar": "u1", "short": "i2", "ushort": "u2",
    "int": "i4", "uint": "u4", "float": "f4", "double": "f8",
}  # fmt: skip
_TYPES |= {np.dtype(dtype).name: dtype for dtype in _TYPES.values()}  # int8, uint8 and so on


class PlyFormat(enum.StrEnum):
    ASCII = "ascii"
    LITTLE = "binary_little_endian"
    BIG = "binary_big_endian"


_NATIVE = PlyFormat.LITTLE if sys.byteorder == "little" else PlyFormat.BIG


class Property(msgspec.Struct, frozen=True, kw_only=True):
    """A column: its numpy type without the byte order, that of its items for a list."""

    name: str
    dtype: str
    is_list: bool = False


class PlyElement(msgspec.Struct):
    name: str
    rows: int
    properties: list[Property] = []

    @property
    def has_lists(self) -> bool:
        return any(column.is_list for column in self.properties)

    @property
    def row_nbytes(self) -> int:
        """Size of a row in a binary file, if it has no lists."""
        return sum(int(column.dtype[1:]) for column in self.properties)


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
    """A described file: only its header was read. `before`: what comes before the vertices, in bytes of a binary file,
    the header included; in text, in lines after the header."""

    path: str
    stat: FileStat
    form: PlyFormat
    vertex: PlyElement
    header_nbytes: int
    before: int

    @property
    def rows(self) -> int:
        return self.vertex.rows

    @property
    def blocks(self) -> list[VertexBlock]:
        blocks: list[VertexBlock] = []
        column = in_row = offset = 0
        for dtype, columns in groupby(self.vertex.properties, key=lambda column: column.dtype):
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
        fields: list[Field] = []
        for block in self.blocks:
            shape, strides, itemsize = (self.rows,), (len(block.names),), int(block.dtype[1:])
            for place, name in enumerate(block.names):
                at = offset + block.offset + place * itemsize
                fields.append(Field(name=name, dtype=block.dtype, shape=shape, offset=at, strides=strides))
        return Layout(fields=tuple(fields), nbytes=self.nbytes)

    @property
    def _is_plain(self) -> bool:
        """Whether the vertices are in memory as in the file: they are read without a copy."""
        blocks = self.blocks
        is_same = self.form is _NATIVE or blocks[0].dtype[1:] == "1"
        return self.form is not PlyFormat.ASCII and len(blocks) == 1 and is_same

    def parts(self) -> list[range]:
        """Return the rows in parts which threads can read at once; all in one part if they are decoded."""
        step = max(1, PART_NBYTES // self.vertex.row_nbytes) if self._is_plain else self.rows
        return [range(first, min(first + step, self.rows)) for first in range(0, self.rows, step)]

    def read(self, sink: Sink, offset: int = 0) -> None:
        for part in self.parts():
            self.read_part(part, sink, offset)

    def read_part(self, rows: range, sink: Sink, offset: int = 0) -> None:
        """Read these vertices into the sink; `offset` is that of the first vertex of the file."""
        with opened(self.path) as (file, now):
            check_unchanged(self.path, self.stat, now)
            if self.form is PlyFormat.ASCII:
                file.seek(self.header_nbytes)
                self._read_text(file, sink, offset)
                return
            done = rows.start * self.vertex.row_nbytes
            file.seek(self.before + done)
            if self._is_plain:
                for view in sink.views(offset + done, len(rows) * self.vertex.row_nbytes):
                    self._fill(file, view)
            else:
                self._read_chunks(file, sink, offset)

    def _fill(self, file: BufferedReader, view: memoryview) -> None:
        if file.readinto(view) != view.nbytes:
            raise AssetError(self.path, "it ends before its last vertex", hint="it is truncated")

    def _read_chunks(self, file: BufferedReader, sink: Sink, offset: int) -> None:
        row_nbytes = self.vertex.row_nbytes
        step = max(1, CHUNK_NBYTES // row_nbytes)
        chunk = bytearray(min(step, self.rows) * row_nbytes)
        for first in range(0, self.rows, step):
            count = min(step, self.rows - first)
            self._fill(file, memoryview(chunk)[: count * row_nbytes])
            for block in self.blocks:
                # One void item per row: numpy copies it at once, and columns item by item.
                rows = np.ndarray((count,), f"V{block.row_nbytes}", chunk, block.in_row, (row_nbytes,))
                at = offset + block.offset + first * block.row_nbytes
                views = sink.views(at, rows.nbytes)
                target = np.frombuffer(views[0], rows.dtype) if len(views) == 1 else np.empty_like(rows)
                np.copyto(target, rows)
                if self.form is not _NATIVE:
                    target.view(block.dtype).byteswap(inplace=True)
                if len(views) > 1:
                    write_array(sink, at, target)

    def _read_text(self, file: BufferedReader, sink: Sink, offset: int) -> None:
        """In text, a row of every element is a line."""
        before, done, blocks = self.before, 0, self.blocks
        for lines in _lines(self.path, file):
            vertices = lines[before : before + self.rows - done]
            before = max(0, before - len(lines))
            if not vertices:
                continue
            table = _parse_rows(self.path, vertices, done, len(self.vertex.properties))
            for block in blocks:
                values = table[:, block.column : block.column + len(block.names)]
                at = offset + block.offset + done * block.row_nbytes
                write_array(sink, at, _as_type(self.path, values, block.dtype, block.names, done))
            done += len(vertices)
            if done == self.rows:
                return
        raise AssetError(self.path, f"its header says {self.rows:,} vertices, but it has {done:,}")


def _lines(path: str, file: BufferedReader) -> Iterator[list[str]]:
    rest = b""
    while chunk := file.read(1 << 16):  # numpy holds the GIL while it parses: about a millisecond for this
        whole, newline, rest = (rest + chunk).rpartition(b"\n")
        if newline:
            yield whole.replace(b"\r\n", b"\n").removesuffix(b"\r").decode("latin-1").split("\n")
        if len(rest) > LINE_LIMIT:
            raise AssetError(path, f"it has a line of more than {LINE_LIMIT:,} bytes")
    if rest:
        yield [rest.removesuffix(b"\r").decode("latin-1")]


def _parse_rows(path: str, lines: list[str], first: int, columns: int) -> np.ndarray[Any, np.dtype[np.float64]]:
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


def _as_type(
    path: str, values: np.ndarray[Any, np.dtype[np.float64]], dtype: str, names: Sequence[str], first: int
) -> np.ndarray[Any, Any]:
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


def describe(path: str) -> Ply:
    """Read the header. Raises AssetError if the file is too short for it."""
    with opened(path) as (file, stat):
        form, elements = _read_header(file, path)
        header_nbytes = file.tell()
    place = next((place for place, element in enumerate(elements) if element.name == "vertex"), None)
    if place is None:
        raise AssetError(path, "it has no element called vertex")
    before, vertex = elements[:place], elements[place]
    columns = Counter(column.name for column in vertex.properties)
    twice = next((name for name, times in columns.items() if times > 1), None)
    is_text = form is PlyFormat.ASCII
    problem = (
        (not vertex.rows and "it has no vertices")
        or (not columns and "its vertices have no properties")
        or (vertex.has_lists and "its vertices have properties that are lists, which is not supported")
        or (twice is not None and f"its vertices have two properties called {_shown(twice)}")
    )
    if problem:
        raise AssetError(path, problem)
    if not is_text and any(element.has_lists for element in before):
        raise AssetError(path, "it has lists before its vertices", hint="write its vertices first, or as text")
    if is_text:  # a number and its separator are two bytes; the last separator may lack
        least = sum(each.rows * max(1, 2 * len(each.properties)) for each in (*before, vertex)) - 1
    else:
        least = sum(each.rows * each.row_nbytes for each in (*before, vertex))
    data_nbytes = stat.nbytes - header_nbytes
    if data_nbytes < least:
        raise AssetError(
            path,
            f"its header says {vertex.rows:,} vertices, which need at least {least:,} bytes "
            f"of data, but it has {data_nbytes:,}",
            hint="it is truncated, or its header is wrong",
        )
    size = sum(each.rows if is_text else each.rows * each.row_nbytes for each in before)
    start = size if is_text else header_nbytes + size
    return Ply(path=path, stat=stat, form=form, vertex=vertex, header_nbytes=header_nbytes, before=start)


def _read_header(file: BinaryIO, path: str) -> tuple[PlyFormat, list[PlyElement]]:
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
                if not (rows.isascii() and rows.isdecimal() and len(rows) <= 18):  # no file has more rows than that
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
    return form, elements


def _header_lines(file: BinaryIO, path: str) -> Iterator[list[str]]:
    """Yield the words of each line between the first and the last."""
    first = file.readline(len(b"ply\r\n"))
    if not first:
        raise AssetError(path, "it is empty")
    if first.rstrip() != b"ply" or not first.endswith(b"\n"):
        raise AssetError(path, "it is not a PLY file", hint="other formats need your own loader (--loader)")
    left = 1 << 20  # bytes to read, because a file may not be PLY at all
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
            return Property(name=name, dtype=_TYPES[item], is_list=True)
        case (kind, name) if kind in _TYPES:
            return Property(name=name, dtype=_TYPES[kind])
        case _:
            return None


def _shown(words: str) -> str:
    return repr(words if len(words) <= 60 else words[:60] + "…")
