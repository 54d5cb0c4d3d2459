"""The layout of an asset's arrays in one sequence of bytes: the same in RAM, in VRAM and in a streamed frame. Pure.

An asset is bytes plus a layout, so moving it is a single copy for any number of arrays. Arrays may be strided: the
columns of a PLY file stay in its rows. A field's offset and strides are multiples of its item size.
"""

from collections.abc import Iterable

import msgspec

ALIGNMENT = 16


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
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


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
