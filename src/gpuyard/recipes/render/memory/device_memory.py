"""The interface to a device's memory: `cuda_memory` is a GPU through PyTorch, `host_memory` simulates one on the host.
The caller of `free` ensures that no work on the device still uses the buffer."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from gpuyard.errors import DeviceFull
from gpuyard.model.out_of_memory import recognise

Buffer = Any
Mark = Any  # a point in the work that a lane has queued
# Of arrays, as numpy writes them without the byte order.
NUMBER_TYPES = frozenset({"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"})


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
        """Copy into the buffer, from its start, after the mark `after` has passed; wait for that. Threads' calls
        overlap."""

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
    """Return a DeviceFull if the error says that the device is out of memory, else None. It is a new error, because the
    traceback of the old one keeps alive the device memory of its frames."""
    text = f"{type(error).__name__}: {error}"
    is_full = isinstance(error, DeviceFull) or type(error).__name__ == "OutOfMemoryError"
    if is_full or (isinstance(error, RuntimeError) and recognise(text) is not None):
        return DeviceFull(str(error).partition("\n")[0])
    return None
