"""Read the header of a PLY file: its format, elements and sizes.

Reads at most `HEADER_LIMIT` bytes, because a file may not be PLY at all. The vertices must be a table of numbers, one
row each. Every mistake is an AssetError.
"""

import enum
import functools
import re
from collections import Counter
from collections.abc import Iterator
from typing import BinaryIO

import msgspec

from gpuyard.errors import AssetError

HEADER_LIMIT = 1 << 20

_NAMES = {
    "i1": ("char", "int8"),
    "u1": ("uchar", "uint8"),
    "i2": ("short", "int16"),
    "u2": ("ushort", "uint16"),
    "i4": ("int", "int32"),
    "u4": ("uint", "uint32"),
    "f4": ("float", "float32"),
    "f8": ("double", "float64"),
}
_TYPES = {name: dtype for dtype, names in _NAMES.items() for name in names}
_COUNT = re.compile(r"[0-9]{1,18}")  # no file has more rows than that


class PlyFormat(enum.StrEnum):
    ASCII = "ascii"
    LITTLE = "binary_little_endian"
    BIG = "binary_big_endian"


class Property(msgspec.Struct, frozen=True, kw_only=True):
    """A column: its numpy type without the byte order. A list has a type for its length, too."""

    name: str
    dtype: str
    length_dtype: str | None = None

    @property
    def least_nbytes(self) -> int:
        """Minimum size in a row of a binary file; exact unless it is a list."""
        return int((self.length_dtype or self.dtype)[1:])


class PlyElement(msgspec.Struct, frozen=True, kw_only=True):
    """A table: its columns and its number of rows."""

    name: str
    rows: int
    properties: tuple[Property, ...]

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


def read_header(file: BinaryIO, path: str) -> Header:
    """Read the header from the start of a file, and leave the file at the end of the header."""
    form = None
    elements: list[tuple[str, int, list[Property]]] = []
    for words in _header_lines(file, path):
        match words:
            case [] | ["comment" | "obj_info", *_]:
                pass
            case ["format", name, "1.0"] if name in list(PlyFormat):
                form = PlyFormat(name)
            case ["element", name, rows]:
                elements.append((name, _row_count(path, name, rows), []))
            case ["property", *definition] if elements:
                elements[-1][2].append(_property(path, definition))
            case _:
                raise AssetError(path, f"its header has a line that cannot be understood: {_shown(' '.join(words))}")
    if form is None:
        raise AssetError(path, "its header has no format")
    tables = [PlyElement(name=name, rows=rows, properties=tuple(columns)) for name, rows, columns in elements]
    return _find_vertices(path, form, tables, file.tell())


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


def _row_count(path: str, element: str, word: str) -> int:
    if not _COUNT.fullmatch(word):
        raise AssetError(path, f"its header says that element {_shown(element)} has {_shown(word)} rows")
    return int(word)


def _property(path: str, definition: list[str]) -> Property:
    column = _column(*definition)
    if column is None:
        raise AssetError(path, f"its header has a property of no known type: {_shown(' '.join(definition))}")
    return column


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
    twice = next((name for name, times in columns.items() if times > 1), None)
    problem = (
        (not vertex.rows and "it has no vertices")
        or (not columns and "its vertices have no properties")
        or (vertex.has_lists and "its vertices have properties that are lists, which is not supported")
        or (twice is not None and f"its vertices have two properties called {_shown(twice)}")
    )
    if problem:
        raise AssetError(path, problem)
    return Header(form=form, before=tuple(elements[:place]), vertex=vertex, nbytes=nbytes)


def _shown(words: str) -> str:
    return repr(words if len(words) <= 60 else words[:60] + "…")
