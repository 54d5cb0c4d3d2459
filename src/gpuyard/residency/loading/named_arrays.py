"""The arrays of a scene or a frame by name, as the renderer gets them: views without a copy."""

from collections.abc import Iterator, Mapping
from typing import Any

from gpuyard.residency.memory.device_memory import Buffer, DeviceMemory
from gpuyard.residency.planning.array_layout import Field, Layout


class Arrays(Mapping[str, Any]):
    """Views into one buffer: numpy arrays on the host, tensors on CUDA. Valid until the renderer returns."""

    def __init__(self, memory: DeviceMemory, buffer: Buffer, layout: Layout, path: str) -> None:
        self._memory, self._buffer = memory, buffer
        self._fields = {field.name: field for field in layout.fields}
        self.path = path

    def __getitem__(self, name: str) -> Any:
        field = self._fields[name]
        return self._view(field, field.shape, field.strides)

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def columns(self, *names: str) -> Any:
        """Return adjacent arrays of equal length and type as one array of shape (rows, names), without a copy.

        Raises KeyError if one is missing, ValueError if they are not adjacent in the asset.
        """
        fields = [self._fields[name] for name in names]
        first = fields[0]
        if len(first.shape) != 1 or not _are_adjacent(fields):
            raise ValueError(f"{', '.join(names)} are not adjacent in {self.path}")
        return self._view(first, (first.shape[0], len(names)), (first.strides[0], 1))

    def _view(self, field: Field, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        return self._memory.view(self._buffer, dtype=field.dtype, shape=shape, offset=field.offset, strides=strides)

    def __repr__(self) -> str:
        return f"<Arrays of {self.path}: {', '.join(self._fields)}>"


def _are_adjacent(fields: list[Field]) -> bool:
    first, itemsize = fields[0], int(fields[0].dtype[1:])
    return all(
        (field.dtype, field.shape, field.strides) == (first.dtype, first.shape, first.strides)
        and field.offset == first.offset + place * itemsize
        for place, field in enumerate(fields)
    )
