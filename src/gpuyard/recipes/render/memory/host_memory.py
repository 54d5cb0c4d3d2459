"""A device simulated on the host, with limited memory and real copies, for machines without a GPU."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuyard.errors import DeviceFull
from gpuyard.model.units import MB, format_size
from gpuyard.recipes.render.memory.device_memory import Mark, TransferLane

Bytes = npt.NDArray[np.uint8]


class _NoLane:
    """The host copies synchronously."""

    def mark(self) -> Mark:
        return None

    def finish(self) -> None:
        return None


class HostMemory:
    name = "host"

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._used = self._peak = 0
        self._lock = threading.Lock()

    def page(self, nbytes: int) -> memoryview:
        return np.empty(nbytes, np.uint8).data

    def allocate(self, nbytes: int) -> Bytes:
        with self._lock:
            if self._used + nbytes > self._nbytes:
                free = format_size((self._nbytes - self._used) / MB)
                raise DeviceFull(f"the simulated device is full: {format_size(nbytes / MB)} requested, {free} free")
            self._used += nbytes
            self._peak = max(self._peak, self._used)
        return np.empty(nbytes, np.uint8)

    def free(self, buffer: Bytes) -> None:
        with self._lock:
            self._used -= buffer.nbytes

    def upload(self, views: Sequence[memoryview], buffer: Bytes, *, after: Mark = None) -> None:  # noqa: ARG002
        start = 0
        for view in views:
            buffer[start : (start := start + view.nbytes)] = np.frombuffer(view, np.uint8)

    def download(self, buffer: Bytes, views: Sequence[memoryview]) -> None:
        start = 0
        for view in views:
            np.frombuffer(view, np.uint8)[:] = buffer[start : (start := start + view.nbytes)]

    def view(
        self, buffer: Bytes, *, dtype: str, shape: tuple[int, ...], offset: int, strides: tuple[int, ...]
    ) -> npt.NDArray[Any]:
        itemsize = np.dtype(dtype).itemsize
        return np.ndarray(shape, dtype, buffer.data, offset, tuple(stride * itemsize for stride in strides))

    def clone(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array.copy()

    @contextlib.contextmanager
    def lane(self) -> Iterator[TransferLane]:
        yield _NoLane()

    def used(self) -> int:
        return self._used

    def peak(self) -> int:
        return self._peak

    def empty_cache(self) -> None:
        return None

    def close(self) -> None:
        return None
