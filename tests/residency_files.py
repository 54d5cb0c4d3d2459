"""Assets on disk for tests, and a sink to read them into."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuyard.recipes.render.memory.named_arrays import Layout

FORMS = ("ascii", "binary_little_endian", "binary_big_endian")
NAMES_OF_TYPES = {
    "i1": ("char", "int8"),
    "u1": ("uchar", "uint8"),
    "i2": ("short", "int16"),
    "u2": ("ushort", "uint16"),
    "i4": ("int", "int32"),
    "u4": ("uint", "uint32"),
    "f4": ("float", "float32"),
    "f8": ("double", "float64"),
}
SPLAT_NAMES = (
    *("x", "y", "z", "nx", "ny", "nz"),
    *(f"f_dc_{index}" for index in range(3)),
    *(f"f_rest_{index}" for index in range(45)),
    *("opacity", "scale_0", "scale_1", "scale_2", "rot_0", "rot_1", "rot_2", "rot_3"),
)

Table = npt.NDArray[Any]  # a structured array


def splats(count: int, seed: int = 0) -> Table:
    """Gaussian splats: 62 properties, all float32."""
    values = np.random.default_rng(seed).normal(size=(count, len(SPLAT_NAMES))).astype("f4")
    return values.view([(name, "f4") for name in SPLAT_NAMES]).reshape(count)


def points(count: int, seed: int = 0) -> Table:
    """Coloured points: float32 positions and one byte per colour channel."""
    random = np.random.default_rng(seed)
    table = np.empty(count, [*((name, "f4") for name in "xyz"), *((name, "u1") for name in ("red", "green", "blue"))])
    for name, (dtype, *_) in (table.dtype.fields or {}).items():
        table[name] = random.normal(size=count) if dtype.kind == "f" else random.integers(0, 256, count)
    return table


def write_ply(
    path: Path | str,
    vertices: Table | Mapping[str, npt.ArrayLike],
    form: str = "binary_little_endian",
    *,
    comments: Sequence[str] = (),
    faces: Sequence[Sequence[int]] = (),
    faces_first: bool = False,
    newline: str = "\n",
) -> Path:
    """Write a PLY file with these vertices, and with the faces, if any, behind or before them."""
    table = vertices if isinstance(vertices, np.ndarray) else _table(vertices)
    elements = [(_vertex_header(table), _vertex_rows(table, form, newline))]
    if faces:
        elements.append((_face_header(faces), _face_rows(faces, form, newline)))
    if faces_first:
        elements.reverse()
    lines = ["ply", f"format {form} 1.0", *(f"comment {comment}" for comment in comments)]
    lines += [line for header, _ in elements for line in header]
    header = "".join(f"{line}{newline}" for line in [*lines, "end_header"])
    Path(path).write_bytes(header.encode() + b"".join(rows for _, rows in elements))
    return Path(path)


def _table(columns: Mapping[str, npt.ArrayLike]) -> Table:
    arrays = {name: np.asarray(column) for name, column in columns.items()}
    table = np.empty(len(next(iter(arrays.values()))), [(name, array.dtype) for name, array in arrays.items()])
    for name, array in arrays.items():
        table[name] = array
    return table


def _vertex_header(table: Table) -> list[str]:
    fields = [(name, dtype.str[1:]) for name, (dtype, *_) in (table.dtype.fields or {}).items()]
    # PLY has two names for each type, and both are in use.
    kinds = [NAMES_OF_TYPES[dtype][place % 2] for place, (_, dtype) in enumerate(fields)]
    named = [f"property {kind} {name}" for kind, (name, _) in zip(kinds, fields, strict=True)]
    return [f"element vertex {len(table)}", *named]


def _vertex_rows(table: Table, form: str, newline: str) -> bytes:
    if form == "ascii":
        return "".join(" ".join(str(value) for value in row) + newline for row in table).encode()
    return table.astype(table.dtype.newbyteorder("<" if form == "binary_little_endian" else ">")).tobytes()


def _face_header(faces: Sequence[Sequence[int]]) -> list[str]:
    return [f"element face {len(faces)}", "property list uchar int vertex_indices", "property uchar material"]


def _face_rows(faces: Sequence[Sequence[int]], form: str, newline: str) -> bytes:
    if form == "ascii":
        return "".join(" ".join(map(str, (len(face), *face, 7))) + newline for face in faces).encode()
    dtype = "<i4" if form == "binary_little_endian" else ">i4"
    return b"".join(bytes([len(face)]) + np.array(face, dtype).tobytes() + b"\7" for face in faces)


class PagedSink:
    """Memory in pages of any size; a page may end within a value."""

    def __init__(self, nbytes: int, page_nbytes: int = 64) -> None:
        self.nbytes = nbytes
        self._page = page_nbytes
        self._pages = [bytearray(b"\xaa" * page_nbytes) for _ in range(-(-nbytes // page_nbytes))]

    def views(self, offset: int, nbytes: int) -> list[memoryview]:
        end = offset + nbytes
        assert 0 <= offset < end <= self.nbytes
        numbers = range(offset // self._page, (end - 1) // self._page + 1)
        starts = [number * self._page for number in numbers]
        return [
            memoryview(self._pages[number])[max(offset - start, 0) : end - start]
            for number, start in zip(numbers, starts, strict=True)
        ]

    def arrays(self, layout: Layout) -> dict[str, npt.NDArray[Any]]:
        content = b"".join(self._pages)
        return {
            field.name: np.ndarray(
                field.shape,
                field.dtype,
                content,
                field.offset,
                [stride * np.dtype(field.dtype).itemsize for stride in field.strides],
            )
            for field in layout.fields
        }
