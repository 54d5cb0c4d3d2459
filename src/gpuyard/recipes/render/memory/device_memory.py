"""The interface to a device's memory, and a device simulated on the host: limited memory and real copies, for machines
without a GPU. `cuda_memory` is a GPU through PyTorch.

A buffer is a sequence of bytes on the device; an asset in VRAM is one buffer. The caller of `free` ensures that no work
on the device still uses the buffer. Pages are host memory that the device can copy from at full speed.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gpuyard.errors import DeviceFull
from gpuyard.model.out_of_memory import recognise
from gpuyard.model.units import MB, format_size

Buffer = Any
Mark = Any  # a point in the work that a lane has queued


class TransferLane(Protocol):
    """A worker's own queue of work on the device."""

    def mark(self) -> Mark: ...

    def finish(self) -> None:
        """Wait until all work queued here is done."""


class DeviceMemory(Protocol):
    name: str

    def page(self, nbytes: int) -> memoryview:
        """Return writable host memory, valid until `close`."""

    def allocate(self, nbytes: int) -> Buffer:
        """Raises DeviceFull if the device has too little free memory."""

    def free(self, buffer: Buffer) -> None: ...

    def upload(self, views: Sequence[memoryview], buffer: Buffer, *, after: Mark = None) -> None:
        """Copy into the buffer, from its start, after the mark `after` has passed. Returns when the copy is complete.
        Calls from different threads overlap."""

    def download(self, buffer: Buffer, views: Sequence[memoryview]) -> None: ...

    def view(self, buffer: Buffer, *, dtype: str, shape: tuple[int, ...], offset: int, strides: tuple[int, ...]) -> Any:
        """Return an array on the device; `offset` is in bytes, `strides` in items."""

    def clone(self, array: Any) -> Any:
        """Return a copy on the device that belongs to the caller."""

    def lane(self) -> AbstractContextManager[TransferLane]:
        """Return a lane for the calling thread, valid inside the `with` block."""

    def used(self) -> int:
        """Return the used bytes as the allocator counts them."""

    def peak(self) -> int:
        """Return the peak of `used`."""

    def empty_cache(self) -> None: ...

    def close(self) -> None: ...


def as_device_full(error: BaseException) -> DeviceFull | None:
    """Return a DeviceFull if the error's type or PyTorch's message says that the device is out of memory, else None. It
    is a new error, because the traceback of the old one keeps alive the device memory of its frames."""
    text = f"{type(error).__name__}: {error}"
    is_full = isinstance(error, DeviceFull) or type(error).__name__ == "OutOfMemoryError"
    if is_full or (isinstance(error, RuntimeError) and recognise(text) is not None):
        return DeviceFull(str(error).partition("\n")[0])
    return None


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
        for view, part in zip(views, _parts(buffer, views), strict=True):
            part[:] = np.frombuffer(view, np.uint8)

    def download(self, buffer: Bytes, views: Sequence[memoryview]) -> None:
        for view, part in zip(views, _parts(buffer, views), strict=True):
            np.frombuffer(view, np.uint8)[:] = part

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


def _parts(buffer: Bytes, views: Sequence[memoryview]) -> Iterator[Bytes]:
    start = 0
    for view in views:
        yield buffer[start : start + view.nbytes]
        start += view.nbytes
