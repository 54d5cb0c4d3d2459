"""What the tiers need of a device's memory: `host` simulates one on the host, `cuda` is a real one through PyTorch.

A buffer is a run of bytes on the device; an asset in VRAM is one of them. Whoever frees a buffer has seen to it that
nothing on the device still uses it. Pages are host memory that the device can copy from at its full speed.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from gpuyard.core.memory.out_of_memory import recognise
from gpuyard.errors import DeviceFull

Buffer = Any
Mark = Any  # a moment in the work that a lane has queued


class TransferLane(Protocol):
    """A worker's own queue of work on the device."""

    def mark(self) -> Mark: ...

    def finish(self) -> None:
        """Until all that was queued here is done."""


class DeviceMemory(Protocol):
    name: str

    def page(self, nbytes: int) -> memoryview:
        """Host memory, writable, for as long as this memory is open."""

    def allocate(self, nbytes: int) -> Buffer:
        """DeviceFull where there is no room."""

    def free(self, buffer: Buffer) -> None: ...

    def upload(self, views: Sequence[memoryview], buffer: Buffer, *, after: Mark = None) -> None:
        """Into the buffer, from its start. Returns when it is there; waits for `after` on the device first.

        Calls from different threads overlap.
        """

    def download(self, buffer: Buffer, views: Sequence[memoryview]) -> None: ...

    def view(self, buffer: Buffer, *, dtype: str, shape: tuple[int, ...], offset: int, strides: tuple[int, ...]) -> Any:
        """An array on the device; `offset` in bytes, `strides` in items."""

    def clone(self, array: Any) -> Any:
        """A copy on the device that is the caller's own."""

    def lane(self) -> AbstractContextManager[TransferLane]:
        """For the calling thread, while it is entered."""

    def used(self) -> int:
        """By the allocator's own figure."""

    def peak(self) -> int:
        """The most that was ever used, by the allocator's own figure."""

    def empty_cache(self) -> None: ...

    def close(self) -> None: ...


def as_device_full(error: BaseException) -> DeviceFull | None:
    """What it says, where it says that a device is out of memory: by its type, or as PyTorch words it.

    A new error: the traceback of the old one keeps alive what its frames have on the device.
    """
    text = f"{type(error).__name__}: {error}"
    is_full = isinstance(error, DeviceFull) or type(error).__name__ == "OutOfMemoryError"
    if is_full or (isinstance(error, RuntimeError) and recognise(text) is not None):
        return DeviceFull(str(error).partition("\n")[0])
    return None
