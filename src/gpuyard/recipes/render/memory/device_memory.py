"""The interface to a device's memory: `cuda_memory` is a GPU through PyTorch, `host_memory` simulates one on the host.
The caller of `free` ensures that no work on the device still uses the buffer."""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from gpuyard.errors import DeviceFull
from gpuyard.model.out_of_memory import recognise

Buffer = Any
Mark = Any  # a point in the work that a lane has queued
# Of arrays, as numpy writes them without the byte order.
NUMBER_TYPES = frozenset({"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"})


class TransferLane(Protocol):
    """A worker's own queue of work on the device. `finish` waits until all of it is done."""

    def mark(self) -> Mark: ...
    def finish(self) -> None: ...


class DeviceMemory(Protocol):
    """`page` returns writable host memory, valid until `close`. `allocate` raises DeviceFull if there is too little
    free memory. `upload` copies into the buffer, from its start, after the mark `after` has passed, and waits for that;
    calls of threads overlap. `view` returns an array on the device: `offset` in bytes, `strides` in items. `clone`
    returns a copy that belongs to the caller, `lane` a lane for the calling thread. `used` and its `peak` are in bytes,
    as the allocator counts them."""

    name: str

    def page(self, nbytes: int) -> memoryview: ...
    def allocate(self, nbytes: int) -> Buffer: ...
    def free(self, buffer: Buffer) -> None: ...
    def upload(self, views: Sequence[memoryview], buffer: Buffer, *, after: Mark = None) -> None: ...
    def download(self, buffer: Buffer, views: Sequence[memoryview]) -> None: ...
    def view(
        self, buffer: Buffer, *, dtype: str, shape: tuple[int, ...], offset: int, strides: tuple[int, ...]
    ) -> Any: ...
    def clone(self, array: Any) -> Any: ...
    def lane(self) -> AbstractContextManager[TransferLane]: ...
    def used(self) -> int: ...
    def peak(self) -> int: ...
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


# Copies in RAM are lists of pages of one size, which are reused: memory never fragments.
SMALLEST, LARGEST = 1 << 12, 1 << 23


def page_size(ram: int) -> int:
    """Return a power of two: small relative to the budget, but large enough for copies at full speed."""
    return max(SMALLEST, min(LARGEST, 1 << max(0, (ram // 4096).bit_length() - 1)))


class Pages:
    """A sequence of bytes on pages of `size` bytes, each taken when it is first used: so one part is read while memory
    for the next is pinned. Any thread may use them."""

    def __init__(self, nbytes: int, size: int, take: Callable[[], memoryview]) -> None:
        self.nbytes = nbytes
        self._size, self._take = size, take
        self._pages: list[memoryview | None] = [None] * -(-nbytes // size)
        self._lock = threading.Lock()

    @property
    def pages(self) -> list[memoryview]:
        """The pages that were taken so far."""
        return [page for page in self._pages if page is not None]

    def _page(self, number: int) -> memoryview:
        with self._lock:
            page = self._pages[number]
            if page is None:
                page = self._pages[number] = self._take()
            return page

    def views(self, offset: int, nbytes: int) -> list[memoryview]:
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ValueError(f"bytes {offset} to {offset + nbytes} of {self.nbytes}")
        found = []
        while nbytes:
            page = self._page(offset // self._size)
            start = offset % self._size
            part = page[start : start + nbytes]
            found.append(part)
            offset, nbytes = offset + part.nbytes, nbytes - part.nbytes
        return found


class PagePool:
    """Reuses pages that were given back; new ones are made with `make`."""

    def __init__(self, make: Callable[[int], memoryview], size: int) -> None:
        self._make, self.size = make, size
        self._free: list[memoryview] = []
        self._lock = threading.Lock()

    def rounded(self, nbytes: int) -> int:
        """Round up to whole pages."""
        return -(-nbytes // self.size) * self.size

    def take(self, nbytes: int) -> Pages:
        return Pages(nbytes, self.size, self._page)

    def _page(self) -> memoryview:
        with self._lock:
            if self._free:
                return self._free.pop()
        return self._make(self.size)

    def give_back(self, blob: Pages) -> None:
        with self._lock:
            self._free.extend(blob.pages)
