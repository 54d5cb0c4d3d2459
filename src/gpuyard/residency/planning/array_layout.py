"""How the arrays of an asset lie in one run of bytes: the same in RAM, in VRAM and in a streamed frame. Pure.

An asset is bytes plus a layout, so that moving it is one copy however many arrays it has. Arrays may be strided: the
columns of a PLY file stay in its rows. All of a field's offsets and strides are multiples of its item size.
"""

from collections.abc import Iterable

import msgspec

ALIGNMENT = 16


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """One array: its numpy type as `f4`, `u1`, …; `offset` in bytes; `strides` in items, as many as `shape` has."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """All arrays of one scene or of one frame."""

    fields: tuple[Field, ...]
    nbytes: int

    def field(self, name: str) -> Field | None:
        return next((field for field in self.fields if field.name == name), None)


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def packed(arrays: Iterable[tuple[str, str, tuple[int, ...], int]]) -> Layout:
    """One after the other, each dense: (name, dtype, shape, item size)."""
    fields, end = [], 0
    for name, dtype, shape, itemsize in arrays:
        strides, count = [], 1
        for length in reversed(shape):
            strides.append(count)
            count *= length
        fields.append(Field(name=name, dtype=dtype, shape=shape, offset=end, strides=tuple(reversed(strides))))
        end = aligned(end + count * itemsize)
    return Layout(fields=tuple(fields), nbytes=end)
